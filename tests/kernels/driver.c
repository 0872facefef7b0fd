/* Runs every kernel on random sizes, in buffers that end where the data end; built with sanitizers by test_sanitizers.py. */

#include "kernels.c"

#include <stdio.h>

static uint64_t state = 1;

static uint64_t draw(uint64_t below)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % below;
}

/* A buffer of exactly `bytes` bytes at an address that may be odd; `holder` is what to free. */
static void *buffer(int64_t bytes, int odd, void **holder)
{
    char *memory = malloc(bytes + odd);
    for (int64_t i = 0; i < bytes + odd; i++)
        memory[i] = (char)(draw(4) ? draw(256) : 0);
    *holder = memory;
    return memory + odd;
}

int main(void)
{
    static const int size[] = {4, 8, 2, 2, 1, 1, 2, 4, 8};
    static const uint64_t value[2] = {1, 2};
    for (int round = 0; round < ROUNDS; round++) {
        int dtype = (int)draw(9), wide = dtype == F64 || dtype >= I8 ? 8 : 4;
        int64_t outer = draw(4), reduced = draw(8) ? draw(70) : draw(3000), inner = draw(2) ? 1 : 1 + draw(draw(9) ? 40 : 1500);
        int64_t n = outer * reduced * inner, slices = outer * inner;
        void *held[10];
        void *x = buffer(n * size[dtype], (int)draw(2), &held[0]);
        uint8_t *mask = buffer(n, 1, &held[1]);
        void *own = buffer(slices * 8, 0, &held[2]), *factor = buffer(slices * 8, 0, &held[3]);
        void *out = buffer(n * 16, 0, &held[4]), *total = buffer(slices * 8, 0, &held[5]);
        int64_t *count = buffer(slices * 8, 0, &held[6]), kept = 0, counted = 0;
        void *gradient = buffer(n * wide, 0, &held[7]), *result = buffer(n * wide, 0, &held[8]);
        uint8_t *made = buffer(n, 0, &held[9]);
        Input in = {x, mask, outer, reduced, inner, draw(2) ? NAN : 1.0, 1, dtype, 1 + (int)draw(3)}, bare = in;
        bare.mask = NULL;
        NAME(gg_valid)(&in, made);
        NAME(gg_valid)(&bare, made);
        NAME(gg_count)(mask, outer, reduced, inner, count, 2);
        for (int64_t i = 0; i < n; i++)
            kept += mask[i] != 0;
        for (int64_t i = 0; i < slices; i++)
            counted += count[i];
        NAME(gg_sum)(&in, ELEMENTS, NULL, -1, total, count);
        for (int64_t i = 0; i < slices; i++)
            counted += count[i];
        if (counted != 2 * kept) {
            printf("round %d: %lld are kept, %lld were counted\n", round, (long long)kept, (long long)counted / 2);
            return 1;
        }
        NAME(gg_sum)(&bare, ELEMENTS, NULL, dtype < I8 ? 0 : -1, total, NULL);
        NAME(gg_mode)(&in, count, total);
        NAME(gg_mode)(&bare, count, total);
        NAME(gg_fill)(x, mask, value, n, size[dtype], out, 2);
        NAME(gg_expand)(own, mask, outer, reduced, inner, size[dtype] < 8 ? size[dtype] : 8, out, 2);
        NAME(gg_choose)(out, x, NULL, mask, n, 1, size[dtype], 2);
        NAME(gg_choose)(out, x, out, mask, n, 1 + (int64_t)draw(5), size[dtype], 2);
        if (dtype < I8) {
            const void *data[] = {x, out};
            const int64_t counts[] = {n, n}, dtypes[] = {dtype, dtype};
            NAME(gg_nonfinite)(data, counts, dtypes, 2, 2);
            for (int op = LARGEST; op <= EQUALS; op++) {
                NAME(gg_fold)(&in, op, op > SMALLEST ? own : NULL, total);
                NAME(gg_fold)(&bare, op, op > SMALLEST ? own : NULL, total);
            }
            for (int op = DIFFERENCES; op <= SQUARES; op++) {
                NAME(gg_sum)(&in, op, own, 1.5, total, count);
                NAME(gg_sum)(&bare, op, own, -1, total, NULL);
            }
            NAME(gg_first)(&in, total);
            NAME(gg_logsumexp)(&in, total);
            NAME(gg_find)(&in, total, count);
            NAME(gg_find)(&bare, total, count);
            for (int op = DISTANCES; op <= WEIGHTS; op++)
                NAME(gg_map)(&in, op, own, factor, out);
            if (inner == 1) {
                NAME(gg_softmax)(&in, (int)draw(2), NULL, NULL, out);
                Input back = in;
                back.x = result;
                back.dtype = wide == 8 ? F64 : F32;
                NAME(gg_softmax)(&back, (int)draw(2), result, gradient, out);
            }
        }
        for (int i = 0; i < 10; i++)
            free(held[i]);
    }
    return 0;
}
