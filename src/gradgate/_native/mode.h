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
    const Input *in;
    int excluding;    /* whether elements with the code `except` are left out */
    uint64_t except;
    int64_t *index, *count;
    char *values;     /* the modes, of the dtype of x */
    int failed;
} ModeJob;

typedef struct {
    uint64_t *codes, *kept, *keys; /* of all elements of a slice and of the kept ones; of the slots of a table */
    uint32_t *counts;              /* of the slots of a table, or of bins */
    uint64_t bins;
} ModeSpace;

/* Find the mode of a slice: its code's last place, and how often it is. */
static void mode_slice(const ModeJob *job, int64_t offset, ModeSpace *space, int64_t *index, int64_t *count)
{
    const Input *in = job->in;
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
    } else if (job->excluding) {
        for (int64_t i = 0; i < in->reduced; i++) {
            space->kept[kept] = codes[i];
            kept += codes[i] != job->except;
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

/* Find the most frequent of a few codes U for each of many neighbouring slices: compared in pairs, a vector of slices at a
   time. `kept` is -1 for what takes part. */
#define VOTE(U)                                                                                                         \
    static void vote_##U(U codes[FEW][VOTES], U kept[FEW][VOTES], int64_t n, int64_t many, U *best, U *top, U *place)   \
    {                                                                                                                   \
        typedef U V __attribute__((vector_size(VECTOR), may_alias));                                                    \
        for (int64_t s = 0; s < many; s += VECTOR / (int64_t)sizeof(U)) {                                               \
            V winner = {0}, most = {0}, at = {0};                                                                       \
            for (int64_t r = 0; r < n; r++) {                                                                           \
                /* Each counts itself and its equals before it, so that the last of them has the full count. */         \
                const V code = *(V *)&codes[r][s], takes = *(V *)&kept[r][s];                                           \
                V times = -takes;                                                                                       \
                for (int64_t before = 0; before < r; before++)                                                          \
                    times -= *(V *)&kept[before][s] & (V)(*(V *)&codes[before][s] == code);                             \
                const V wins = ((V)(times > most) | ((V)(times == most) & (V)(code <= winner))) & takes;                \
                most = (times & wins) | (most & ~wins);                                                                 \
                winner = (code & wins) | (winner & ~wins);                                                              \
                at = (((V){0} + (U)r) & wins) | (at & ~wins);                                                           \
            }                                                                                                           \
            *(V *)&best[s] = winner;                                                                                    \
            *(V *)&top[s] = most;                                                                                       \
            *(V *)&place[s] = at;                                                                                       \
        }                                                                                                               \
    }
VOTE(uint8_t)
VOTE(uint64_t)
#undef VOTE

/* Write what is kept of neighbouring slices as bytes; say whether it does not fit. */
#define LABELS(T)                                                                                                       \
    INLINE int labels_##T(const ModeJob *job, int by_mask, int64_t next, int64_t offset, int64_t step, int64_t many,    \
                          uint8_t codes[FEW][VOTES], uint8_t kept[FEW][VOTES])                                          \
    {                                                                                                                   \
        const T value = (T)job->in->whole;                                                                              \
        const int all = !job->excluding;                                                                                \
        T beyond = 0;                                                                                                   \
        for (int64_t r = 0; r < job->in->reduced; r++) {                                                                \
            const T *x = (const T *)job->in->x + offset + r * step;                                                     \
            const uint8_t *mask = by_mask ? job->in->mask + offset + r * step : (const uint8_t *)x;                     \
            for (int64_t s = 0; s < many; s++) {                                                                        \
                const T e = x[s * next], takes = (T) - (T)(by_mask ? mask[s * next] != 0 : (e != value) | all);         \
                codes[r][s] = (uint8_t)e;                                                                               \
                kept[r][s] = (uint8_t)takes;                                                                            \
                beyond |= e & takes;                                                                                    \
            }                                                                                                           \
        }                                                                                                               \
        return (beyond & (T)~(T)0xff) != 0;                                                                             \
    }
LABELS(UInt8)
LABELS(Int32)
LABELS(Int64)
#undef LABELS

/* Write the elements at some places of neighbouring slices, as words. */
static void take_votes(const ModeJob *job, int64_t offset, int64_t step, int64_t next, int64_t many, int64_t slice)
{
    const Input *in = job->in;
    const int64_t *index = job->index + slice;
#define TAKE(T)                                                                                                         \
    for (int64_t s = 0; s < many; s++)                                                                                  \
        ((T *)job->values)[slice + s] = ((const T *)in->x)[offset + s * next + (index[s] < 0 ? 0 : index[s]) * step];
    static const int sizes[] = {4, 8, 2, 2, 1, 1, 2, 4, 8};
    const int bytes = sizes[in->dtype];
    if (bytes == 1)
        TAKE(UInt8)
    else if (bytes == 2)
        TAKE(UInt16)
    else if (bytes == 4)
        TAKE(UInt32)
    else
        TAKE(UInt64)
#undef TAKE
}

/* Find the modes of neighbouring slices of no more than FEW elements: labels up to 255 as bytes, all others as codes. */
static void mode_votes(const ModeJob *job, int64_t slice, int64_t many)
{
    const Input *in = job->in;
    const int64_t n = in->reduced, step = in->inner > 1 ? in->inner : 1, next = in->inner > 1 ? 1 : n;
    const int64_t offset = slice / in->inner * in->inner * n + slice % in->inner;
    int64_t *index = job->index + slice, *count = job->count + slice, large = in->dtype < I8;
    const uint8_t *mask = in->mask;
#define FOUND(U)                                                                                                        \
    U best[VOTES] ALIGNED, top[VOTES] ALIGNED, place[VOTES] ALIGNED;                                                    \
    vote_##U(codes, kept, n, many, best, top, place);                                                                   \
    for (int64_t s = 0; s < many; s++) {                                                                                \
        count[s] = (int64_t)top[s];                                                                                     \
        index[s] = top[s] ? (int64_t)place[s] : -1;                                                                     \
    }
    if (!large) {
        uint8_t codes[FEW][VOTES] ALIGNED, kept[FEW][VOTES] ALIGNED;
#define LABELS(T) (mask ? next == 1 ? labels_##T(job, 1, 1, offset, step, many, codes, kept)                             \
                                    : labels_##T(job, 1, next, offset, step, many, codes, kept)                         \
                   : next == 1 ? labels_##T(job, 0, 1, offset, step, many, codes, kept)                                 \
                               : labels_##T(job, 0, next, offset, step, many, codes, kept))
        large = in->dtype == U8    ? LABELS(UInt8)
                : in->dtype == I32 ? LABELS(Int32)
                : in->dtype == I64 ? LABELS(Int64)
                                   : 1;
#undef LABELS
        if (!large) {
            FOUND(uint8_t)
        }
    }
    if (large) {
        uint64_t codes[FEW][VOTES] ALIGNED, kept[FEW][VOTES] ALIGNED;
        for (int64_t r = 0; r < n; r++) {
            codes_of(in, offset + r * step, next, many, codes[r]);
            for (int64_t s = 0; s < many; s++)
                kept[r][s] = -(uint64_t)(mask ? mask[offset + r * step + s * next] != 0 : !job->excluding || codes[r][s] != job->except);
        }
        FOUND(uint64_t)
    }
#undef FOUND
    take_votes(job, offset, step, next, many, slice);
}

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
            mode_votes(job, slice, LEAST(row - first, VOTES));
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
        for (int64_t slice = from; slice < to; slice++) {
            const int64_t offset = slice / in->inner * in->inner * n + slice % in->inner;
            mode_slice(job, offset, &space, job->index + slice, job->count + slice);
            take_votes(job, offset, in->inner, 1, 1, slice);
        }
    else
        job->failed = 1;
    free(space.codes);
    free(space.kept);
    free(space.keys);
    free(space.counts);
}

/* The mode of each slice, the last kept element with it, -1 if nothing is kept, and how often it is kept. Without a mask,
   the excluded value is left out if `excluding`. Returns how many slices keep nothing, or -1 for lack of memory. */
EXPORT int64_t GG(mode)(const Input *in, int32_t excluding, void *values, int64_t *index, int64_t *count)
{
    ModeJob job = {in, excluding && !in->mask, 0, index, count, values, 0};
    int64_t slices = in->outer * in->inner, empty = 0, row = in->inner > 1 ? in->inner : in->outer;
    if (slices == 0 || in->reduced == 0) {
        memset(count, 0, slices * sizeof *count);
        return slices;
    }
    job.except = in->dtype == F64    ? code_of_double(in->value)
                 : in->dtype == F32  ? code_of_float((float)in->value)
                 : in->dtype >= I8   ? (uint64_t)in->whole ^ (in->dtype == U8 ? 0 : 0x8000000000000000u)
                                     : 0; /* halves come with a mask */
    int64_t units = in->reduced <= FEW ? slices / row * ((row + VOTES - 1) / VOTES) : slices;
    run(mode_body, &job, units, size_of(in), in->threads);
    for (int64_t i = 0; i < slices; i++)
        empty += count[i] == 0;
    return job.failed ? -1 : empty;
}
