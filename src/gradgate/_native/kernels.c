/* The native kernels of gradgate: masked reductions and their gradients on the CPU.

   Plain C11 with the vector types of GCC and clang; no header of torch or Python. `_kernels.py` calls it through ctypes.

   Layout. A tensor is (outer, reduced, inner), contiguous; a slice is x[o, :, i]. A mask has one byte for each element,
   and any byte but 0 keeps it. Without a mask, what is kept is what differs from one value, which may be NaN.

   Values. float16 and bfloat16 are decoded to float32 a block at a time; float32 and float64 are read where they lie. An
   element that is left out is replaced by bits before any arithmetic, so it cannot leak. Every sum is cut into the same
   blocks and added in the same order, whatever the vector width of the processor and the number of threads.

   Files. `floats.h` is included for float and for double, `integers.h` for each integer dtype; `mode.h` has the mode, and
   `words.h` what does not depend on the meaning of the elements. The build compiles all of it once for each LEVEL of the
   processor; a symbol is gg_<kernel>_<level>, and gg_level() says which to call. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifndef _WIN32
#include <pthread.h>
#endif
#ifdef __AVX2__
#include <immintrin.h>
#endif

/* Bytes of a vector. */
#ifdef __AVX512BW__
#define VECTOR 64
#elif defined(__AVX2__)
#define VECTOR 32
#else
#define VECTOR 16
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define LEAST(a, b) ((a) < (b) ? (a) : (b))
#define ALIGNED __attribute__((aligned(VECTOR)))
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define GG(name) JOIN(gg_##name, LEVEL)

/* Elements as they lie in memory, at any address. */
#define ANYWHERE __attribute__((aligned(1), may_alias))
typedef float Float32 ANYWHERE;
typedef double Float64 ANYWHERE;
typedef int8_t Int8 ANYWHERE;
typedef uint8_t UInt8 ANYWHERE;
typedef int16_t Int16 ANYWHERE;
typedef uint16_t UInt16 ANYWHERE;
typedef int32_t Int32 ANYWHERE;
typedef uint32_t UInt32 ANYWHERE;
typedef int64_t Int64 ANYWHERE;
typedef uint64_t UInt64 ANYWHERE;
typedef unsigned __int128 UInt128 ANYWHERE;

/* The order of _kernels.py. */
enum { F32, F64, F16, BF16, I8, U8, I16, I32, I64 };
enum { ELEMENTS, DIFFERENCES, SQUARES, LARGEST, SMALLEST, EXPONENTIALS, EQUALS }; /* reductions */
enum { DISTANCES, SHARES, WEIGHTS };                                              /* gradients */

enum { BY_MASK, BY_NAN, BY_VALUE }; /* what says that an element is left out */

enum { BLOCK = 4096 };    /* elements of a row that are read together; their sum is rounded no more */
enum { TILE = 1024 };     /* columns that one unit of work takes */
enum { ROWS = 4 };        /* rows of columns that are read together */
enum { FLUSH = 128 };     /* rows of columns whose sums are rounded no more */
enum { PART = 1 << 18 };  /* elements of a long slice that one unit of work takes */
enum { WORTH = 1 << 18 }; /* elements that are worth another thread */

typedef struct {
    const void *x;
    const uint8_t *mask;
    int64_t outer, reduced, inner;
    double value;  /* what is left out where there is no mask, for floating dtypes */
    int64_t whole; /* the same for integers */
    int32_t dtype, threads;
} Input;

/* --- threads ------------------------------------------------------------------------------------------------------ */

typedef void (*Body)(void *job, int64_t from, int64_t to);

typedef struct {
    Body body;
    void *job;
    int64_t from, to;
} Share;

#ifndef _WIN32
static void *run_share(void *argument)
{
    Share *share = argument;
    share->body(share->job, share->from, share->to);
    return NULL;
}
#endif

/* Call body for the units 0..units, in several threads if each of them has enough to do. */
static void run(Body body, void *job, int64_t units, int64_t elements, int threads)
{
#ifndef _WIN32
    enum { MOST = 64 };
    int64_t shares = elements / WORTH + 1;
    shares = LEAST(LEAST(shares, threads), LEAST(units, MOST));
    if (shares > 1) {
        pthread_t started[MOST];
        Share share[MOST];
        int64_t first = 0, running = 0;
        for (int64_t i = 0; i < shares; i++) {
            int64_t last = units / shares * (i + 1) + (units % shares) * (i + 1) / shares;
            share[i] = (Share){body, job, first, last};
            first = last;
        }
        while (running < shares - 1 && !pthread_create(&started[running], NULL, run_share, &share[running]))
            running++;
        for (int64_t i = running; i < shares; i++) /* the last one, and any that the system has no thread for */
            run_share(&share[i]);
        for (int64_t i = 0; i < running; i++)
            pthread_join(started[i], NULL);
        return;
    }
#endif
    (void)elements, (void)threads;
    body(job, 0, units);
}

/* --- units of work ------------------------------------------------------------------------------------------------ */

typedef struct {
    int64_t parts, tiles, length; /* a slice has parts of `length` rows, a row has tiles of columns */
} Cut;

typedef struct {
    int64_t offset, rows, width; /* where it begins, how many rows of how many columns */
    int64_t slice, result;       /* its place in (outer, inner) and in (outer, parts, inner) */
} Piece;

static Cut cut_of(const Input *in)
{
    Cut cut = {.length = PART / LEAST(in->inner > 0 ? in->inner : 1, TILE)};
    cut.parts = in->reduced > cut.length ? (in->reduced + cut.length - 1) / cut.length : 1;
    cut.tiles = (in->inner + TILE - 1) / TILE;
    return cut;
}

static Piece piece_of(const Input *in, const Cut *cut, int64_t unit)
{
    if (cut->parts == 1 && in->inner == 1) /* a whole row: no division */
        return (Piece){unit * in->reduced, in->reduced, 1, unit, unit};
    int64_t tile = unit % cut->tiles, part = unit / cut->tiles % cut->parts, o = unit / cut->tiles / cut->parts;
    int64_t row = part * cut->length, column = tile * TILE;
    return (Piece){
        .offset = (o * in->reduced + row) * in->inner + column,
        .rows = LEAST(in->reduced - row, cut->length),
        .width = LEAST(in->inner - column, TILE),
        .slice = o * in->inner + column,
        .result = (o * cut->parts + part) * in->inner + column,
    };
}

static int64_t size_of(const Input *in)
{
    return in->outer * in->reduced * in->inner;
}

/* --- the level of the processor ----------------------------------------------------------------------------------- */

#if LEVEL == 0
EXPORT int32_t gg_version(void)
{
    return GRADGATE_KERNELS;
}

/* The highest level that this processor runs: 0 baseline, 1 AVX2, 2 AVX-512. */
EXPORT int32_t gg_level(void)
{
#ifdef __x86_64__
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return 2;
    if (__builtin_cpu_supports("avx2"))
        return 1;
#endif
    return 0;
}
#endif

/* --- floating dtypes ------------------------------------------------------------------------------------------------ */

typedef float Floats __attribute__((vector_size(16), may_alias));
typedef double Doubles __attribute__((vector_size(32)));

/* Bytes of a mask as what F(takes) of floats.h gives. Compilers do not find the instructions by themselves. */

#if VECTOR == 64
INLINE __mmask16 set_f(const uint8_t *mask)
{
    const __m128i bytes = _mm_loadu_si128((const __m128i *)mask);
    return _mm_test_epi8_mask(bytes, bytes);
}

INLINE __mmask8 set_d(const uint8_t *mask)
{
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)mask);
    return (__mmask8)_mm_test_epi8_mask(bytes, bytes);
}
#else
typedef int32_t Ints __attribute__((vector_size(VECTOR), aligned(1), may_alias));
typedef int64_t Longs __attribute__((vector_size(VECTOR), aligned(1), may_alias));

INLINE Ints set_f(const uint8_t *mask)
{
#ifdef __AVX2__
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)mask)) > 0;
#else
    return (Ints){mask[0], mask[1], mask[2], mask[3]} > 0;
#endif
}

INLINE Longs set_d(const uint8_t *mask)
{
#ifdef __AVX2__
    int32_t four;
    memcpy(&four, mask, 4);
    return (Longs)_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four)) > 0;
#else
    return (Longs){mask[0], mask[1]} > 0;
#endif
}
#endif

/* Elements as numbers to compute with: where they lie, or decoded into a block. */

static const Float32 *read_f(const Input *in, int64_t offset, int64_t n, float *block)
{
    if (in->dtype == F32)
        return (const Float32 *)in->x + offset;
    const UInt16 *x = (const UInt16 *)in->x + offset;
    const int64_t upper = in->dtype == BF16 ? n : 0; /* of a bfloat16, the upper half of a float32 */
    for (int64_t i = 0; i < upper; i++)
        ((UInt32 *)block)[i] = (uint32_t)x[i] << 16;
    /* The exponents of a float16 and a float32 differ by 112 in their bias; a multiplication makes subnormals right too. */
    for (int64_t i = upper; i < n; i++) {
        union {
            uint32_t bits;
            float number;
        } e = {.bits = (uint32_t)(x[i] & 0x7fff) << 13};
        e.number *= 0x1p112f;
        e.bits |= ((x[i] & 0x7c00) == 0x7c00 ? 0x7f800000u : 0) | (uint32_t)(x[i] & 0x8000) << 16;
        block[i] = e.number;
    }
    return (const Float32 *)block;
}

INLINE const Float64 *read_d(const Input *in, int64_t offset, int64_t n, double *block)
{
    (void)n, (void)block;
    return (const Float64 *)in->x + offset;
}

#define F(name) name##_f
#define A float
#define I int32_t
#define IS_DOUBLE 0
#define M __mmask16
#define MM(name, end) _mm512_##name##_ps##end
#define MI(name) _mm512_##name##_epi32
#define MAX256(a, b) _mm256_max_ps((__m256)(a), (__m256)(b))
#include "floats.h"
#define F(name) name##_d
#define A double
#define I int64_t
#define IS_DOUBLE 1
#define M __mmask8
#define MM(name, end) _mm512_##name##_pd##end
#define MI(name) _mm512_##name##_epi64
#define MAX256(a, b) _mm256_max_pd((__m256d)(a), (__m256d)(b))
#include "floats.h"

/* Call for the type that a dtype is computed with. */
#define COMPUTE(name, ...) (in->dtype == F64 ? name##_d(__VA_ARGS__) : name##_f(__VA_ARGS__))

/* --- integers: they are added as uint64_t, which wraps around as torch's sums do ------------------------------------- */

static const int64_t lowest[] = {INT8_MIN, 0, INT16_MIN, INT32_MIN, INT64_MIN};

typedef struct {
    const Input *in;
    uint64_t *totals; /* (outer, inner) */
    int64_t *counts;  /* of sums */
    Cut cut;
    int op;
    int64_t least; /* no element is beneath it, with the bits turned around for SMALLEST */
} Whole;

/* N is what 2**14 elements can be added in. */
#define T Int8
#define N uint32_t
#include "integers.h"
#define T UInt8
#define N uint32_t
#include "integers.h"
#define T Int16
#define N uint32_t
#include "integers.h"
#define T Int32
#define N uint64_t
#include "integers.h"
#define T Int64
#define N uint64_t
#include "integers.h"

static void (*const sums[])(void *, int64_t, int64_t) = {sum_Int8, sum_UInt8, sum_Int16, sum_Int32, sum_Int64};
static void (*const valids[])(const Input *, int64_t, int64_t, uint8_t *) = {
    valid_f, valid_d, valid_f, valid_f, valid_Int8, valid_UInt8, valid_Int16, valid_Int32, valid_Int64,
};

/* --- what Python calls ---------------------------------------------------------------------------------------------- */

typedef struct {
    const Input *in;
    uint8_t *out;
} Valid;

static void valid_body(void *argument, int64_t from, int64_t to)
{
    const Valid *job = argument;
    int64_t first = from * BLOCK, last = LEAST(to * BLOCK, size_of(job->in));
    for (int64_t i = first; i < last; i += BLOCK)
        valids[job->in->dtype](job->in, i, LEAST(last - i, BLOCK), job->out + i);
}

/* Write 1 for each element that is not the excluded value, and kept by the mask if there is one; 0 for the others. */
EXPORT void GG(valid)(const Input *in, uint8_t *out)
{
    Valid job = {in, out};
    run(valid_body, &job, (size_of(in) + BLOCK - 1) / BLOCK, size_of(in), in->threads);
}

/* Give an input without a mask one, which is to be freed; NULL for lack of memory. */
static uint8_t *with_mask(Input *in)
{
    uint8_t *made = malloc(in->mask ? 1 : size_of(in) + 1);
    if (made && !in->mask) {
        GG(valid)(in, made);
        in->mask = made;
    }
    return made;
}

/* Reduce what is kept of each slice: the sum of its ELEMENTS, of their DIFFERENCES to `own`, of the SQUARES of these or of
   the EXPONENTIALS of these; the LARGEST or SMALLEST; how many are EQUAL to `own`. A sum is divided by the number kept less
   `correction`, unless that is negative. `out` and `own` are (outer, inner), of the type that is computed with, int64 for
   integers, which have ELEMENTS, LARGEST and SMALLEST only. `count` is for sums; those of integers need it, for
   the others it may be NULL. Returns how many slices keep nothing, for LARGEST and SMALLEST how many may, and -1 for lack
   of memory. */
EXPORT int64_t GG(fold)(const Input *given, int32_t op, const void *own, double correction, void *out, int64_t *count)
{
    Input copy = *given, *in = &copy;
    uint8_t *made = NULL;
    int by_nan = op == LARGEST || op == SMALLEST; /* what needs no mask, see fold_body */
    if (op != ELEMENTS && !(by_nan && (in->value != in->value || in->dtype >= I8)) && !(made = with_mask(in)))
        return -1;
    int64_t empty = 0;
    if (in->dtype < I8)
        empty = COMPUTE(fold, in, op, own, correction, out, count);
    else {
        Whole job = {in, out, count, cut_of(in), op, lowest[in->dtype - I8]};
        const int64_t slices = in->outer * in->inner, turn = op == SMALLEST ? in->dtype == U8 ? 0xff : -1 : 0;
        for (int64_t i = 0; i < slices; i++)
            job.totals[i] = op == ELEMENTS ? 0 : (uint64_t)job.least;
        if (count)
            memset(count, 0, slices * sizeof *count);
        run(sums[in->dtype - I8], &job, in->outer * job.cut.parts * job.cut.tiles, size_of(in), in->threads);
        for (int64_t i = 0; i < slices; i++) {
            empty += op == ELEMENTS ? count[i] == 0 : (int64_t)job.totals[i] == job.least;
            job.totals[i] ^= (uint64_t)turn;
        }
    }
    free(made);
    return empty;
}

/* The logarithm of the sum of exponentials of each slice. Returns -1 for lack of memory. */
EXPORT int64_t GG(logsumexp)(const Input *given, void *out)
{
    Input copy = *given, *in = &copy;
    uint8_t *made = with_mask(in);
    if (!made)
        return -1;
    int64_t failed = COMPUTE(logsumexp, in, out);
    free(made);
    return failed;
}

/* The first element of each slice that is kept and equals `own`, NaN for NaN; -1 if there is none. */
EXPORT void GG(find)(const Input *in, const void *own, int64_t *index)
{
    COMPUTE(find, in, own, index);
}

/* For what the mask keeps: (x - own) * factor (op DISTANCES), factor where x equals own and 0 * factor elsewhere (SHARES),
   or exp(x - own) * factor (WEIGHTS); 0 for the rest. own and factor are (outer, inner). */
EXPORT void GG(map)(const Input *in, int32_t op, const void *own, const void *factor, void *out)
{
    COMPUTE(map, in, op, own, factor, out);
}

/* The softmax of the rows of x (outer, reduced, 1), or its logarithm; with `gradient`, what goes back through `result`. */
EXPORT void GG(softmax)(const Input *in, int32_t logarithm, const void *result, const void *gradient, void *out)
{
    COMPUTE(softmax, in, logarithm, result, gradient, out);
}

/* The first kept element of each slice, 0 if there is none; in->mask is given. */
EXPORT void GG(first)(const Input *in, void *out)
{
    COMPUTE(first, in, out);
}

#include "mode.h"
#include "words.h"
