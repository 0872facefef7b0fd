/* Elements as words of 1 to 16 bytes, whatever they mean: choices by a mask, checksums, repeated indices, and two questions
   about many tensors at once. See kernels.c. */

/* --- a choice by a mask ------------------------------------------------------------------------------------------------ */

/* out[i] = mask[i] ? yes[i] : no[i]; one word stands for all of `yes` or `no` if its step is 0. */
#define CHOOSE(T)                                                                                                       \
    static void choose_##T(T *out, const T *yes, int yes_step, const T *no, int no_step, const uint8_t *mask, int64_t n) \
    {                                                                                                                   \
        const T one = *yes, other = *no; /* may be the first of many */                                                 \
        if (yes_step && no_step)                                                                                        \
            for (int64_t i = 0; i < n; i++)                                                                             \
                out[i] = PICK(T, yes[i], no[i]);                                                                        \
        else if (yes_step)                                                                                              \
            for (int64_t i = 0; i < n; i++)                                                                             \
                out[i] = PICK(T, yes[i], other);                                                                        \
        else if (no_step)                                                                                               \
            for (int64_t i = 0; i < n; i++)                                                                             \
                out[i] = PICK(T, one, no[i]);                                                                           \
        else                                                                                                            \
            for (int64_t i = 0; i < n; i++)                                                                             \
                out[i] = PICK(T, one, other);                                                                           \
    }
#define PICK(T, a, b) (((a) & (T)-(T)(mask[i] != 0)) | ((b) & (T)((T)(mask[i] != 0) - 1)))
CHOOSE(UInt8)
CHOOSE(UInt16)
CHOOSE(UInt32)
CHOOSE(UInt64)
CHOOSE(UInt128)
#undef CHOOSE
#undef PICK

static void choose(int bytes, void *out, const void *yes, int yes_step, const void *no, int no_step, const uint8_t *mask,
                   int64_t n)
{
    if (n > 0)
        bytes == 1   ? choose_UInt8(out, yes, yes_step, no, no_step, mask, n)
        : bytes == 2 ? choose_UInt16(out, yes, yes_step, no, no_step, mask, n)
        : bytes == 4 ? choose_UInt32(out, yes, yes_step, no, no_step, mask, n)
        : bytes == 8 ? choose_UInt64(out, yes, yes_step, no, no_step, mask, n)
                     : choose_UInt128(out, yes, yes_step, no, no_step, mask, n);
}

typedef struct {
    char *out;
    const char *yes, *no;
    int yes_step, no_step, bytes;
    const uint8_t *mask;
    int64_t count, each;            /* elements, and how many of them one byte of the mask decides */
    int64_t outer, reduced, inner;  /* of gg_expand */
} Choice;

static void choose_body(void *argument, int64_t from, int64_t to)
{
    const Choice *job = argument;
    const int64_t bytes = job->bytes, last = LEAST(to * PART, job->count);
    for (int64_t i = from * PART, end; i < last; i = end) {
        end = job->each == 1 ? last : LEAST((i / job->each + 1) * job->each, last);
        const int keep = job->each == 1 || job->mask[i / job->each];
        const char *yes = job->yes + i * bytes * job->yes_step, *no = job->no + i * bytes * job->no_step;
        if (job->each == 1)
            choose(job->bytes, job->out + i * bytes, yes, job->yes_step, no, job->no_step, job->mask + i, end - i);
        else if (!(keep ? job->yes_step : job->no_step))
            memset(job->out + i * bytes, 0, (end - i) * bytes);
        else if ((keep ? yes : no) != job->out + i * bytes)
            memcpy(job->out + i * bytes, keep ? yes : no, (end - i) * bytes);
    }
}

/* out = mask ? yes : no, word by word; `yes` or `no` is one word for all if its step is 0. One byte of the mask decides
   `each` neighbours; if these are more than one, a single word is 0. `no` may be `out`. */
EXPORT void GG(choose)(void *out, const void *yes, int32_t yes_step, const void *no, int32_t no_step, const uint8_t *mask,
                       int64_t count, int64_t each, int32_t bytes, int32_t threads)
{
    Choice job = {out, yes, no, yes_step, no_step, bytes, mask, count, each, 0, 0, 0};
    run(choose_body, &job, (count + PART - 1) / PART, count, threads);
}

static void expand_body(void *argument, int64_t from, int64_t to)
{
    const Choice *job = argument;
    const int64_t bytes = job->bytes, inner = job->inner, parts = (job->reduced + PART - 1) / PART;
    static const uint64_t zero[2] = {0, 0};
    for (int64_t unit = from; unit < to; unit++) { /* a part of a row, or a row of columns */
        int64_t o = unit / (inner == 1 ? parts : job->reduced), first = inner == 1 ? unit % parts * PART : 0;
        int64_t offset = inner == 1 ? o * job->reduced + first : unit * inner;
        int64_t n = inner == 1 ? LEAST(job->reduced - first, PART) : inner;
        choose(job->bytes, job->out + offset * bytes, job->yes + o * inner * bytes, inner > 1, zero, 0, job->mask + offset, n);
    }
}

/* Give each element of (outer, reduced, inner) that the mask keeps the word of its slice, and 0 to the others. */
EXPORT void GG(expand)(const void *slices, const uint8_t *mask, int64_t outer, int64_t reduced, int64_t inner, int32_t bytes,
                       void *out, int32_t threads)
{
    Choice job = {out, slices, NULL, 0, 0, bytes, mask, 0, 1, outer, reduced, inner};
    int64_t units = inner == 1 ? outer * ((reduced + PART - 1) / PART) : outer * reduced;
    run(expand_body, &job, units, outer * reduced * inner, threads);
}

/* --- checksums ----------------------------------------------------------------------------------------------------------- */

enum { SUMMED = 32 }; /* words of a block, as in freezing/_verify.py */

typedef struct {
    const void *words;
    const uint64_t *weights; /* one row, or two for words of 8 bytes */
    uint64_t *sums;          /* as many rows, one sum for each block */
    int64_t count;
    int32_t bytes;
} Checksum;

static void checksum_body(void *argument, int64_t from, int64_t to)
{
    const Checksum *job = argument;
    const uint64_t *weights = job->weights;
    const int64_t blocks = (job->count + SUMMED - 1) / SUMMED;
    for (int64_t block = from; block < to; block++) {
        const int64_t first = block * SUMMED, n = LEAST(job->count - first, SUMMED);
        uint64_t one = 0, other = 0;
#define CHECKSUM(T)                                                                                                     \
    for (int64_t i = 0; i < n; i++)                                                                                     \
        one += (uint64_t)((const T *)job->words)[first + i] * weights[i];
        if (job->bytes == 1)
            CHECKSUM(Int8)
        else if (job->bytes == 2)
            CHECKSUM(Int16)
        else if (job->bytes == 4)
            CHECKSUM(Int32)
        else
            for (int64_t i = 0; i < n; i++) {
                uint64_t mixed = ((const UInt64 *)job->words)[first + i] * 0x2545F4914F6CDD1D;
                mixed ^= mixed >> 32;
                one += mixed * weights[i];
                other += mixed * weights[SUMMED + i];
            }
#undef CHECKSUM
        job->sums[block] = one;
        if (job->bytes == 8)
            job->sums[blocks + block] = other;
    }
}

/* The sum of word times weight, modulo 2**64, of each block of words. */
EXPORT void GG(checksum)(const void *words, int64_t count, int32_t bytes, const uint64_t *weights, uint64_t *sums,
                         int32_t threads)
{
    Checksum job = {words, weights, sums, count, bytes};
    run(checksum_body, &job, (count + SUMMED - 1) / SUMMED, count, threads);
}

/* --- repeated indices ------------------------------------------------------------------------------------------------------ */

/* Say whether an index of 0..size stands twice: 0 no, 1 yes, 2 if one is out of range, -1 for lack of memory. Negative ones
   count from the end. One bit for each place that can be named. */
EXPORT int64_t GG(repeats)(const int64_t *index, int64_t count, int64_t size)
{
    uint64_t *seen = calloc(size / 64 + 1, sizeof *seen);
    int64_t answer = seen ? 0 : -1;
    for (int64_t i = 0; i < count && !answer; i++) {
        int64_t place = index[i] < 0 ? index[i] + size : index[i];
        if (place < 0 || place >= size)
            answer = 2;
        else {
            uint64_t bit = (uint64_t)1 << (place & 63);
            answer = (seen[place >> 6] & bit) != 0;
            seen[place >> 6] |= bit;
        }
    }
    free(seen);
    return answer;
}

/* --- many tensors at once ---------------------------------------------------------------------------------------------------- */

typedef struct {
    const void *data;
    int64_t count, dtype;
} Tensor;

typedef struct {
    const Tensor *tensors;
    int64_t number;
    int32_t found;
} Finite;

/* Say whether the bits of the exponent are all set in one of some words. */
#define NONFINITE(T)                                                                                                    \
    static int nonfinite_##T(const T *words, int64_t n, T exponent)                                                     \
    {                                                                                                                   \
        T found = 0;                                                                                                    \
        for (int64_t i = 0; i < n; i++)                                                                                 \
            found |= (words[i] & exponent) == exponent;                                                                 \
        return found != 0;                                                                                              \
    }
NONFINITE(UInt16)
NONFINITE(UInt32)
NONFINITE(UInt64)
#undef NONFINITE

static void nonfinite_body(void *argument, int64_t from, int64_t to)
{
    Finite *job = argument;
    int64_t unit = 0; /* the first unit of a tensor */
    for (const Tensor *t = job->tensors; t < job->tensors + job->number && unit < to; t++) {
        int64_t units = (t->count + PART - 1) / PART;
        for (int64_t own = from > unit ? from - unit : 0; own < units && unit + own < to; own++) {
            int64_t first = own * PART, n = LEAST(t->count - first, PART);
            if (__atomic_load_n(&job->found, __ATOMIC_RELAXED))
                return;
            if (t->dtype == F32   ? nonfinite_UInt32((const UInt32 *)t->data + first, n, 0x7f800000)
                : t->dtype == F64 ? nonfinite_UInt64((const UInt64 *)t->data + first, n, 0x7ff0000000000000)
                                  : nonfinite_UInt16((const UInt16 *)t->data + first, n, t->dtype == F16 ? 0x7c00 : 0x7f80))
                __atomic_store_n(&job->found, 1, __ATOMIC_RELAXED);
        }
        unit += units;
    }
}

/* Say whether any element of several floating tensors is NaN or infinite. */
EXPORT int32_t GG(nonfinite)(const void *tensors, int64_t number, int32_t threads)
{
    Finite job = {tensors, number, 0};
    int64_t units = 0, elements = 0;
    for (const Tensor *t = job.tensors; t < job.tensors + number; t++) {
        units += (t->count + PART - 1) / PART;
        elements += t->count;
    }
    run(nonfinite_body, &job, units, elements, threads);
    return job.found;
}
