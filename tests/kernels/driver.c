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
    static const uint64_t value[3] = {1, 2, 0};
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
        void *gradient = buffer(n * wide, 0, &held[7]), *result = buffer((n + slices) * wide, 0, &held[8]);
        uint8_t *made = buffer(n, 0, &held[9]);
        Input in = {x, mask, outer, reduced, inner, draw(2) ? NAN : 1.0, 1, dtype, 1 + (int)draw(3)}, bare = in;
        bare.mask = NULL;
        GG(valid)(&in, made);
        GG(valid)(&bare, made);
        Input bytes = {mask, mask, outer, reduced, inner, 0, 0, U8, 2};
        GG(fold)(&bytes, ELEMENTS, NULL, -1, total, count);
        for (int64_t i = 0; i < n; i++)
            kept += mask[i] != 0;
        for (int64_t i = 0; i < slices; i++)
            counted += count[i];
        GG(fold)(&in, ELEMENTS, NULL, -1, total, count);
        for (int64_t i = 0; i < slices; i++)
            counted += count[i];
        if (counted != 2 * kept) {
            printf("round %d: %lld are kept, %lld were counted\n", round, (long long)kept, (long long)counted / 2);
            return 1;
        }
        GG(fold)(&bare, ELEMENTS, NULL, dtype < I8 ? 0 : -1, total, dtype < I8 ? NULL : count);
        GG(mode)(&in, 0, result, count, total);
        GG(mode)(&bare, 0, result, count, total);
        GG(mode)(&bare, 1, result, count, total);
        GG(choose)(out, x, 1, value, 0, mask, n, 1, size[dtype], 2);
        GG(choose)(out, value, 0, out, 1, mask, n, 1, size[dtype], 2);
        GG(choose)(out, value, 0, value, 0, mask, n / 2, 1, 16, 2);
        GG(expand)(own, mask, outer, reduced, inner, size[dtype] < 8 ? size[dtype] : 8, out, 2);
        GG(choose)(out, x, 1, out, 1, mask, n, 1, size[dtype], 2);
        GG(choose)(out, x, 1, out, 1, mask, n, 1 + (int64_t)draw(5), size[dtype], 2);
        GG(choose)(out, x, 1, value + 1, 0, mask, n, 2 + (int64_t)draw(5), size[dtype], 2);
        for (int op = LARGEST; op <= SMALLEST; op++) {
            GG(fold)(&in, op, NULL, -1, total, NULL);
            GG(fold)(&bare, op, NULL, -1, total, NULL);
        }
        if (dtype < I8) {
            const Tensor tensors[] = {{x, n, dtype}, {out, n, dtype}};
            GG(nonfinite)(tensors, 2, 2);
            for (int op = LARGEST; op <= EQUALS; op++) {
                GG(fold)(&in, op, op > SMALLEST ? own : NULL, -1, total, NULL);
                GG(fold)(&bare, op, op > SMALLEST ? own : NULL, -1, total, NULL);
            }
            for (int op = DIFFERENCES; op <= SQUARES; op++) {
                GG(fold)(&in, op, own, 1.5, total, count);
                GG(fold)(&bare, op, own, -1, total, NULL);
            }
            GG(first)(&in, total);
            GG(logsumexp)(&in, total);
            GG(find)(&in, total, count);
            GG(find)(&bare, total, count);
            for (int op = DISTANCES; op <= WEIGHTS; op++)
                GG(map)(&in, op, own, factor, out);
            if (inner == 1) {
                GG(softmax)(&in, (int)draw(2), NULL, NULL, out);
                bare.value = NAN;
                GG(softmax)(&bare, (int)draw(2), NULL, NULL, out);
                Input back = in;
                back.x = result;
                back.dtype = wide == 8 ? F64 : F32;
                GG(softmax)(&back, (int)draw(2), result, gradient, out);
            }
        }
        for (int i = 0; i < 10; i++)
            free(held[i]);
    }
    return 0;
}
