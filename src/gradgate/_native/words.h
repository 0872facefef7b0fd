/* Elements as words of 1, 2, 4 or 8 bytes, whatever they mean: gradients under a mask, pinned elements, checksums, repeated
   indices, and two questions about many tensors at once. See kernels.c. */

/* --- a choice by a mask ------------------------------------------------------------------------------------------- */

typedef struct {
    void *out;
    const void *yes, *no; /* NULL is 0; `no` may be `out` */
    const uint8_t *mask;
    int64_t count, each; /* elements, and how many of them one byte of the mask decides */
} NAME(Choice);

#define CHOOSE(T)                                                                                                       \
    PLAIN_LOOPS static void NAME(choose_##T)(const NAME(Choice) *job, int64_t from, int64_t to)                         \
    {                                                                                                                   \
        const T *yes = job->yes, *no = job->no;                                                                         \
        T *out = job->out;                                                                                              \
        if (job->each > 1) {                                                                                            \
            for (int64_t i = from; i < to;) {                                                                           \
                int64_t end = LEAST((i / job->each + 1) * job->each, to), bytes = (end - i) * sizeof(T);                \
                const T *source = job->mask[i / job->each] ? yes : no;                                                  \
                if (!source)                                                                                            \
                    memset(out + i, 0, bytes);                                                                          \
                else if (source != out)                                                                                 \
                    memcpy(out + i, source + i, bytes);                                                                 \
                i = end;                                                                                                \
            }                                                                                                           \
            return;                                                                                                     \
        }                                                                                                               \
        const uint8_t *mask = job->mask;                                                                                \
        if (no == out && !yes)                                                                                          \
            for (int64_t i = from; i < to; i++)                                                                         \
                out[i] &= (T)((T)(mask[i] != 0) - 1);                                                                   \
        else if (no == out)                                                                                             \
            for (int64_t i = from; i < to; i++)                                                                         \
                out[i] = mask[i] ? yes[i] : out[i];                                                                     \
        else                                                                                                            \
            for (int64_t i = from; i < to; i++)                                                                         \
                out[i] = yes[i] & (T)-(T)(mask[i] != 0);                                                                \
    }
CHOOSE(UInt8)
CHOOSE(UInt16)
CHOOSE(UInt32)
CHOOSE(UInt64)
#undef CHOOSE

#define CHOOSING(bytes)                                                                                                 \
    static void NAME(choose_body_##bytes)(void *argument, int64_t from, int64_t to)                                     \
    {                                                                                                                   \
        const NAME(Choice) *job = argument;                                                                             \
        NAME(choose_##bytes)(job, from *PART, LEAST(to *PART, job->count));                                             \
    }
CHOOSING(UInt8)
CHOOSING(UInt16)
CHOOSING(UInt32)
CHOOSING(UInt64)
#undef CHOOSING

/* out = mask ? yes : no, word by word; one byte of the mask decides `each` neighbours. Without `no` it is 0, and `yes` is
   given; with it, `no` is `out` itself, and `yes` may be NULL for 0. */
EXPORT void NAME(gg_choose)(void *out, const void *yes, const void *no, const uint8_t *mask, int64_t count, int64_t each,
                            int32_t bytes, int32_t threads);
void NAME(gg_choose)(void *out, const void *yes, const void *no, const uint8_t *mask, int64_t count, int64_t each,
                     int32_t bytes, int32_t threads)
{
    NAME(Choice) job = {out, yes, no, mask, count, each};
    Body body = bytes == 1   ? NAME(choose_body_UInt8)
                : bytes == 2 ? NAME(choose_body_UInt16)
                : bytes == 4 ? NAME(choose_body_UInt32)
                             : NAME(choose_body_UInt64);
    run(body, &job, (count + PART - 1) / PART, count, threads);
}

/* --- checksums ---------------------------------------------------------------------------------------------------- */

enum { NAME(SUMMED_WORDS) = 32 }; /* words of a block, as in freezing/_fingerprints.py */

typedef struct {
    const void *words;
    const uint64_t *weights; /* one row, or two for words of 8 bytes */
    uint64_t *sums;          /* as many rows, one sum for each block */
    int64_t count;
    int32_t bytes;
} NAME(Checksum);

#define CHECKSUM(T)                                                                                                     \
    PLAIN_LOOPS static uint64_t NAME(checksum_##T)(const T *words, const uint64_t *weights, int64_t n)                  \
    {                                                                                                                   \
        uint64_t sum = 0;                                                                                               \
        for (int64_t i = 0; i < n; i++)                                                                                 \
            sum += (uint64_t)(int64_t)words[i] * weights[i];                                                            \
        return sum;                                                                                                     \
    }
CHECKSUM(Int8)
CHECKSUM(Int16)
CHECKSUM(Int32)
#undef CHECKSUM

static void NAME(checksum_body)(void *argument, int64_t from, int64_t to)
{
    const NAME(Checksum) *job = argument;
    int64_t blocks = (job->count + NAME(SUMMED_WORDS) - 1) / NAME(SUMMED_WORDS);
    for (int64_t block = from; block < to; block++) {
        int64_t first = block * NAME(SUMMED_WORDS), n = LEAST(job->count - first, NAME(SUMMED_WORDS));
        if (job->bytes == 8) {
            const UInt64 *words = (const UInt64 *)job->words + first;
            uint64_t one = 0, other = 0;
            for (int64_t i = 0; i < n; i++) {
                uint64_t mixed = words[i] * 0x2545F4914F6CDD1D;
                mixed ^= mixed >> 32;
                one += mixed * job->weights[i];
                other += mixed * job->weights[NAME(SUMMED_WORDS) + i];
            }
            job->sums[block] = one;
            job->sums[blocks + block] = other;
        } else
            job->sums[block] = job->bytes == 1 ? NAME(checksum_Int8)((const Int8 *)job->words + first, job->weights, n)
                               : job->bytes == 2
                                   ? NAME(checksum_Int16)((const Int16 *)job->words + first, job->weights, n)
                                   : NAME(checksum_Int32)((const Int32 *)job->words + first, job->weights, n);
    }
}

/* The sum of word times weight, modulo 2**64, of each block of words. */
EXPORT void NAME(gg_checksum)(const void *words, int64_t count, int32_t bytes, const uint64_t *weights, uint64_t *sums,
                              int32_t threads);
void NAME(gg_checksum)(const void *words, int64_t count, int32_t bytes, const uint64_t *weights, uint64_t *sums,
                       int32_t threads)
{
    NAME(Checksum) job = {words, weights, sums, count, bytes};
    run(NAME(checksum_body), &job, (count + NAME(SUMMED_WORDS) - 1) / NAME(SUMMED_WORDS), count, threads);
}

/* --- repeated indices ----------------------------------------------------------------------------------------------- */

/* Say whether an index of 0..size stands twice: 0 no, 1 yes, 2 if one is out of range, -1 for lack of memory. Negative ones
   count from the end. One bit for each place that can be named. */
EXPORT int64_t NAME(gg_repeats)(const int64_t *index, int64_t count, int64_t size);
int64_t NAME(gg_repeats)(const int64_t *index, int64_t count, int64_t size)
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

/* --- many tensors at once ------------------------------------------------------------------------------------------- */

/* Copy the bytes of several tensors. */
EXPORT void NAME(gg_copy)(void *const *to, const void *const *from, const int64_t *bytes, int64_t tensors);
void NAME(gg_copy)(void *const *to, const void *const *from, const int64_t *bytes, int64_t tensors)
{
    for (int64_t i = 0; i < tensors; i++)
        memcpy(to[i], from[i], bytes[i]);
}

typedef struct {
    const void *const *data;
    const int64_t *counts, *dtypes;
    int64_t tensors;
    int32_t found;
} NAME(Finite);

#define NONFINITE(T, exponent)                                                                                          \
    PLAIN_LOOPS static int NAME(nonfinite_##T)(const T *words, int64_t n)                                               \
    {                                                                                                                   \
        T found = 0;                                                                                                    \
        for (int64_t i = 0; i < n; i++)                                                                                 \
            found |= (words[i] & (T)(exponent)) == (T)(exponent);                                                       \
        return found != 0;                                                                                              \
    }
NONFINITE(UInt32, 0x7f800000)
NONFINITE(UInt64, 0x7ff0000000000000)
#undef NONFINITE

PLAIN_LOOPS static int NAME(nonfinite_UInt16)(const UInt16 *words, uint16_t exponent, int64_t n)
{
    uint16_t found = 0;
    for (int64_t i = 0; i < n; i++)
        found |= (words[i] & exponent) == exponent;
    return found != 0;
}

static void NAME(nonfinite_body)(void *argument, int64_t from, int64_t to)
{
    NAME(Finite) *job = argument;
    int64_t unit = 0; /* the first unit of a tensor */
    for (int64_t t = 0; t < job->tensors && unit < to; t++) {
        int64_t units = (job->counts[t] + PART - 1) / PART;
        for (int64_t own = from > unit ? from - unit : 0; own < units && unit + own < to; own++) {
            int64_t first = own * PART, n = LEAST(job->counts[t] - first, PART);
            if (__atomic_load_n(&job->found, __ATOMIC_RELAXED))
                return;
            int bad = job->dtypes[t] == F32   ? NAME(nonfinite_UInt32)((const UInt32 *)job->data[t] + first, n)
                      : job->dtypes[t] == F64 ? NAME(nonfinite_UInt64)((const UInt64 *)job->data[t] + first, n)
                                              : NAME(nonfinite_UInt16)((const UInt16 *)job->data[t] + first,
                                                                         job->dtypes[t] == F16 ? 0x7c00 : 0x7f80, n);
            if (bad)
                __atomic_store_n(&job->found, 1, __ATOMIC_RELAXED);
        }
        unit += units;
    }
}

/* Say whether any element of several floating tensors is NaN or infinite. */
EXPORT int32_t NAME(gg_nonfinite)(const void *const *data, const int64_t *counts, const int64_t *dtypes, int64_t tensors,
                                  int32_t threads);
int32_t NAME(gg_nonfinite)(const void *const *data, const int64_t *counts, const int64_t *dtypes, int64_t tensors,
                           int32_t threads)
{
    NAME(Finite) job = {data, counts, dtypes, tensors, 0};
    int64_t units = 0, elements = 0;
    for (int64_t i = 0; i < tensors; i++) {
        units += (counts[i] + PART - 1) / PART;
        elements += counts[i];
    }
    run(NAME(nonfinite_body), &job, units, elements, threads);
    return job.found;
}
