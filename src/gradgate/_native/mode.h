/* The mode: the smallest of the most frequent kept values of each slice. See kernels.c. */

enum { FEW = 16 };   /* elements of a slice that are compared in pairs */
enum { VOTES = 256 }; /* slices for which that is done together */

static uint64_t code_of_float(float x)
{
    uint32_t bits;
    x = x + 0.0f; /* -0.0 becomes 0.0 */
    memcpy(&bits, &x, 4);
    return x != x ? UINT32_MAX : bits >> 31 ? ~bits : bits | 0x80000000u;
}

static uint64_t code_of_double(double x)
{
    uint64_t bits;
    x = x + 0.0;
    memcpy(&bits, &x, 8);
    return x != x ? UINT64_MAX : bits >> 63 ? ~bits : bits | 0x8000000000000000u;
}

/* Halves are ordered by their bits; `special` are the bits of infinity, above which is NaN. */
static uint64_t code_of_half(uint32_t e, uint32_t special)
{
    uint32_t magnitude = e & 0x7fff;
    return magnitude > special ? 0xffff : magnitude == 0 ? 0x8000 : e >> 15 ? 0xffff & ~e : e | 0x8000;
}

/* Write elements as unsigned integers in the order of the values: one for 0.0 and -0.0, one above all others for NaN. */
static void codes_of(const Input *in, int64_t offset, int64_t stride, int64_t n, uint64_t *out)
{
#define CODES(dtype, T, code)                                                                                           \
    case dtype:                                                                                                         \
        for (int64_t i = 0; i < n; i++) {                                                                               \
            T e = ((const T *)in->x)[offset + i * stride];                                                              \
            out[i] = code;                                                                                              \
        }                                                                                                               \
        break;
    switch (in->dtype) {
        CODES(F32, Float32, code_of_float(e))
        CODES(F64, Float64, code_of_double(e))
        CODES(F16, UInt16, code_of_half(e, 0x7c00))
        CODES(BF16, UInt16, code_of_half(e, 0x7f80))
        CODES(I8, Int8, (uint64_t)e ^ 0x8000000000000000u)
        CODES(U8, UInt8, e)
        CODES(I16, Int16, (uint64_t)e ^ 0x8000000000000000u)
        CODES(I32, Int32, (uint64_t)e ^ 0x8000000000000000u)
        CODES(I64, Int64, (uint64_t)e ^ 0x8000000000000000u)
    }
#undef CODES
}

typedef struct {
    uint64_t *codes, *kept, *keys; /* of all elements of a slice and of the kept ones; of the slots of a table */
    uint32_t *counts;              /* of the slots of a table, or of bins */
    uint64_t bins;
} ModeSpace;

/* Find the mode of a slice: its code's last place, and how often it is. */
static void mode_slice(const Input *in, int64_t offset, ModeSpace *space, int64_t *index, int64_t *count)
{
    const int64_t stride = in->inner;
    const uint8_t *mask = in->mask ? in->mask + offset : NULL;
    const uint64_t *codes = space->codes;
    uint64_t least = UINT64_MAX, most = 0, best = 0, top = 0;
    uint32_t *counts = space->counts;
    int64_t kept = 0, last = in->reduced - 1;
    codes_of(in, offset, stride, in->reduced, space->codes);
    if (mask) {
        for (int64_t i = 0; i < in->reduced; i++) {
            space->kept[kept] = codes[i];
            kept += mask[i * stride] != 0;
        }
        codes = space->kept;
    } else
        kept = in->reduced;
    *index = -1;
    *count = 0;
    if (!kept)
        return;
    for (int64_t i = 0; i < kept; i++) {
        least = codes[i] < least ? codes[i] : least;
        most = codes[i] > most ? codes[i] : most;
    }
    if (most - least < space->bins) { /* labels: a table of counts */
        memset(counts, 0, (most - least + 1) * sizeof *counts);
        for (int64_t i = 0; i < kept; i++)
            counts[codes[i] - least]++;
        for (uint64_t bin = 0; bin <= most - least; bin++)
            if (counts[bin] > top) {
                top = counts[bin];
                best = least + bin;
            }
    } else { /* anything: a table of codes, found by their hash */
        uint64_t slots = 4, *keys = space->keys;
        while (slots < 2 * (uint64_t)kept)
            slots *= 2;
        const int shift = 64 - __builtin_ctzll(slots);
        memset(counts, 0, slots * sizeof *counts);
        for (int64_t i = 0; i < kept; i++) {
            uint64_t slot = codes[i] * 0x9e3779b97f4a7c15u >> shift;
            while (counts[slot] && keys[slot] != codes[i])
                slot = (slot + 1) & (slots - 1);
            keys[slot] = codes[i];
            uint64_t times = ++counts[slot];
            if (times > top || (times == top && codes[i] < best)) {
                top = times;
                best = codes[i];
            }
        }
    }
    while ((mask && !mask[last * stride]) || space->codes[last] != best)
        last--;
    *index = last;
    *count = (int64_t)top;
}

/* Find the most frequent of a few codes U for each of many neighbouring slices: compared in pairs, many slices at a time. */
#define VOTE(U)                                                                                                         \
    static void vote_##U(U codes[FEW][VOTES], U kept[FEW][VOTES], int64_t n, int64_t many, int64_t *index, int64_t *count) \
    {                                                                                                                   \
        U best[VOTES] = {0}, top[VOTES] = {0}, place[VOTES] = {0}, times[VOTES];                                        \
        for (int64_t r = 0; r < n; r++) {                                                                               \
            /* Each counts itself and its equals before it, so that the last of them has the full count. */             \
            memcpy(times, kept[r], sizeof times);                                                                       \
            for (int64_t before = 0; before < r; before++)                                                              \
                for (int64_t s = 0; s < VOTES; s++)                                                                     \
                    times[s] += kept[before][s] & (U) - (U)(codes[before][s] == codes[r][s]);                           \
            for (int64_t s = 0; s < VOTES; s++) {                                                                       \
                U more = (U) - (U)(times[s] > top[s]), equal = (U) - (U)(times[s] == top[s]);                           \
                U less = (U) - (U)(codes[r][s] <= best[s]), wins = (more | (equal & less)) & (U) - kept[r][s];          \
                top[s] = (times[s] & wins) | (top[s] & ~wins);                                                          \
                best[s] = (codes[r][s] & wins) | (best[s] & ~wins);                                                     \
                place[s] = ((U)r & wins) | (place[s] & ~wins);                                                          \
            }                                                                                                           \
        }                                                                                                               \
        for (int64_t s = 0; s < many; s++) {                                                                            \
            count[s] = (int64_t)top[s];                                                                                 \
            index[s] = top[s] ? (int64_t)place[s] : -1;                                                                 \
        }                                                                                                               \
    }
VOTE(uint8_t)
VOTE(uint32_t)
VOTE(uint64_t)
#undef VOTE

/* Find the modes of neighbouring slices of no more than FEW elements, with codes as narrow as the elements. */
static void mode_votes(const Input *in, int64_t slice, int64_t many, int64_t *index, int64_t *count)
{
    const int64_t n = in->reduced, step = in->inner > 1 ? in->inner : 1, next = in->inner > 1 ? 1 : n;
    const int64_t offset = slice / in->inner * in->inner * n + slice % in->inner;
    const int narrow = in->dtype == U8 || in->dtype == I8, wide = in->dtype == F64 || in->dtype == I64;
    const int is_signed = in->dtype == I8 || in->dtype == I16 || in->dtype == I32;
    const uint64_t lowest = is_signed ? 0x8000000000000000u - (narrow ? 0x80u : 0x80000000u) : 0;
    uint64_t row[VOTES];
#define VOTES_OF(U)                                                                                                     \
    {                                                                                                                   \
        U codes[FEW][VOTES], kept[FEW][VOTES];                                                                          \
        if (many < VOTES) {                                                                                             \
            memset(codes, 0, sizeof codes);                                                                             \
            memset(kept, 0, sizeof kept);                                                                               \
        }                                                                                                               \
        for (int64_t r = 0; r < n; r++) {                                                                               \
            codes_of(in, offset + r * step, next, many, row);                                                           \
            for (int64_t s = 0; s < many; s++) {                                                                        \
                codes[r][s] = (U)(row[s] - lowest);                                                                     \
                kept[r][s] = in->mask ? in->mask[offset + r * step + s * next] != 0 : 1;                                \
            }                                                                                                           \
        }                                                                                                               \
        vote_##U(codes, kept, n, many, index, count);                                                                   \
    }
    if (narrow)
        VOTES_OF(uint8_t)
    else if (wide)
        VOTES_OF(uint64_t)
    else
        VOTES_OF(uint32_t)
#undef VOTES_OF
}

typedef struct {
    const Input *in;
    int64_t *index, *count;
    int failed;
} ModeJob;

/* The units are groups of VOTES neighbouring slices, or single slices. */
static void mode_body(void *argument, int64_t from, int64_t to)
{
    ModeJob *job = argument;
    const Input *in = job->in;
    const int64_t n = in->reduced;
    if (n <= FEW) {
        const int64_t row = in->inner > 1 ? in->inner : in->outer, groups = (row + VOTES - 1) / VOTES;
        for (int64_t unit = from; unit < to; unit++) {
            int64_t first = unit % groups * VOTES, slice = unit / groups * row + first;
            mode_votes(in, slice, LEAST(row - first, VOTES), job->index + slice, job->count + slice);
        }
        return;
    }
    uint64_t slots = 4;
    while (slots < 2 * (uint64_t)n)
        slots *= 2;
    ModeSpace space = {.bins = slots < 256 ? 256 : slots};
    space.codes = malloc(n * sizeof(uint64_t));
    space.kept = malloc(n * sizeof(uint64_t));
    space.keys = malloc(slots * sizeof(uint64_t));
    space.counts = malloc(space.bins * sizeof(uint32_t));
    if (space.codes && space.kept && space.keys && space.counts)
        for (int64_t slice = from; slice < to; slice++)
            mode_slice(in, slice / in->inner * in->inner * n + slice % in->inner, &space, job->index + slice,
                       job->count + slice);
    else
        job->failed = 1;
    free(space.codes);
    free(space.kept);
    free(space.keys);
    free(space.counts);
}

/* The last kept element with the mode of each slice, -1 if nothing is kept, and how often it is kept. Returns how many
   slices keep nothing, or -1 for lack of memory. */
EXPORT int64_t GG(mode)(const Input *in, int64_t *index, int64_t *count)
{
    ModeJob job = {in, index, count, 0};
    int64_t slices = in->outer * in->inner, empty = 0, row = in->inner > 1 ? in->inner : in->outer;
    if (slices == 0)
        return 0;
    int64_t units = in->reduced <= FEW ? slices / row * ((row + VOTES - 1) / VOTES) : slices;
    run(mode_body, &job, units, size_of(in), in->threads);
    for (int64_t i = 0; i < slices; i++)
        empty += count[i] == 0;
    return job.failed ? -1 : empty;
}
