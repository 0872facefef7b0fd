/* The native kernels of gradgate: masked reductions and their gradients on the CPU.

   Plain C11 with the vector types of GCC and clang; no header of torch or Python. `_kernels.py` calls it through ctypes.

   Layout. A tensor is (outer, reduced, inner), contiguous; a slice is x[o, :, i]. A mask has one byte for each element,
   and any byte but 0 keeps it. Without a mask, what is kept is what differs from one value, which may be NaN.

   Blocks. `decode` reads a block of any dtype and writes it as numbers to compute with (float32 for halves), with a fill
   value where an element is left out; all arithmetic is done on decoded blocks, so what is left out is read and never
   used. That is why only `decode` and its kin exist for each dtype. Every sum is cut into the same blocks and added in the
   same order whatever the vector width of the processor and the number of threads, so that neither changes a bit.

   Files. `decode.h` is included once for each floating dtype, `integers.h` for each other one, `sums.h` and
   `blocks.h` once for each type that is computed with. The build compiles
   all of it once for each LEVEL of the processor; a symbol is gg_<kernel>_<level>, and gg_level() says which to call. */

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifndef _WIN32
#include <pthread.h>
#endif
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default"))) extern
#define INLINE static inline __attribute__((always_inline))
#define AT(base, offset) ((base) ? (base) + (offset) : NULL)
#define LEAST(a, b) ((a) < (b) ? (a) : (b))
#define ALIGNED __attribute__((aligned(VECTOR)))
#if defined(__GNUC__) && !defined(__clang__)
#define PLAIN_LOOPS __attribute__((optimize("O3"))) /* loops that the compiler is to make vectors of */
#else
#define PLAIN_LOOPS
#endif
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)

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

enum { BY_MASK, BY_NAN, BY_VALUE }; /* what says that an element is left out */

enum { F32, F64, F16, BF16, I8, U8, I16, I32, I64 }; /* the order of _kernels.py */

enum { VECTOR = 32 };     /* bytes of a vector */
enum { BLOCK = 512 };     /* elements of a row that are decoded at a time */
/* Reductions of decoded blocks, and gradients. */
enum { LARGEST, SMALLEST, EXPONENTIALS, EQUALS };
enum { ELEMENTS, DIFFERENCES, SQUARES }; /* what is added up */
enum { DISTANCES, SHARES, WEIGHTS };

enum { FEW = 16 };        /* elements of a slice that are compared in pairs to find the mode */
enum { VOTES = 256 };     /* slices for which that is done together */
enum { SUMMED = 4096 };   /* elements that are added before their sum is rounded no more, in W */
enum { PART = 1 << 16 };  /* elements of a long slice that one unit of work takes */
enum { TILE = 1024 };     /* columns that one unit of work takes */
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
    shares = shares < threads ? shares : threads;
    shares = shares < units ? shares : units;
    shares = shares < MOST ? shares : MOST;
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

/* --- the level of the processor ----------------------------------------------------------------------------------- */

#if LEVEL == 0
EXPORT int32_t gg_version(void);
int32_t gg_version(void)
{
    return GRADGATE_KERNELS;
}

/* The highest level that this processor runs: 0 baseline, 1 AVX2. Vectors are 32 bytes wide and the loops bound by memory,
   so that there is no level for AVX-512: it would double the time of the build. */
EXPORT int32_t gg_level(void);
int32_t gg_level(void)
{
#ifdef __x86_64__
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2"))
        return 1;
#endif
    return 0;
}
#endif

#define NAME(name) JOIN(name, LEVEL)

typedef int32_t Lanes8 __attribute__((vector_size(VECTOR), aligned(1), may_alias));
typedef int64_t Lanes4 __attribute__((vector_size(VECTOR), aligned(1), may_alias));
typedef int8_t Byte8 __attribute__((vector_size(8), aligned(1), may_alias));
typedef int8_t Byte4 __attribute__((vector_size(4), aligned(1), may_alias));

/* Bytes of a mask to lanes, -1 where an element is left out; and lanes of 0 and -1 to bytes of 0 and 1. Compilers do not find the instructions by themselves. */

INLINE Lanes8 int32_t_left(const uint8_t *mask)
{
#ifdef __AVX2__
    return (Lanes8)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)mask)) == 0;
#else
    return __builtin_convertvector(*(const Byte8 *)mask, Lanes8) == 0;
#endif
}

INLINE Lanes4 int64_t_left(const uint8_t *mask)
{
#ifdef __AVX2__
    int32_t four;
    memcpy(&four, mask, 4);
    return (Lanes4)_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four)) == 0;
#else
    return __builtin_convertvector(*(const Byte4 *)mask, Lanes4) == 0;
#endif
}

INLINE void int32_t_store(uint8_t *out, Lanes8 take)
{
#ifdef __AVX2__
    uint32_t bits = _mm256_movemask_ps((__m256)take);
    uint32_t low = (bits & 15) * 0x204081 & 0x1010101, high = (bits >> 4) * 0x204081 & 0x1010101;
    memcpy(out, &low, 4);
    memcpy(out + 4, &high, 4);
#else
    *(Byte8 *)out = __builtin_convertvector(-take, Byte8);
#endif
}

INLINE void int64_t_store(uint8_t *out, Lanes4 take)
{
#ifdef __AVX2__
    uint32_t bytes = (uint32_t)_mm256_movemask_pd((__m256d)take) * 0x204081 & 0x1010101;
    memcpy(out, &bytes, 4);
#else
    *(Byte4 *)out = __builtin_convertvector(-take, Byte4);
#endif
}
/* The larger of two in each lane, the second if they cannot be compared; likewise the lesser. */
#ifdef __AVX2__
#define PICK(name, a, b) (sizeof(A) == 4 ? (AV)_mm256_##name##_ps((__m256)(a), (__m256)(b)) : (AV)_mm256_##name##_pd((__m256d)(a), (__m256d)(b)))
#define GREATER(a, b) PICK(max, a, b)
#define LESSER(a, b) PICK(min, a, b)
#else
#define PICK(condition, a, b) ((AV)(((IV)(a) & (IV)(condition)) | ((IV)(b) & ~(IV)(condition))))
#define GREATER(a, b) PICK((a) > (b), a, b)
#define LESSER(a, b) PICK((a) < (b), a, b)
#endif

#define LEFT(mask) JOIN(I, left)(mask)
#define STORE_KEPT(out, take) JOIN(I, store)(out, take)

/* For an element or a vector of them: NaN is other than any number, and not other than NaN. */
#define OTHER_THAN(e, value) (((e) != (value)) & (((e) == (e)) | -((value) == (value))))
#define A float
#define W double
#define I int32_t

#define T Float32
#define T_NAME(name) NAME(name##_f32)
#define READ(v) (v)
#define DIRECT
#include "decode.h"
#undef DIRECT

#define T UInt16 /* the upper half of a float32 */
#define T_NAME(name) NAME(name##_bf16)
#define READ(v) ((AV)(__builtin_convertvector(v, IV) << 16))
#include "decode.h"

/* The exponents of a float16 and a float32 differ by 112 in their bias; a multiplication makes subnormals right too. */
#define T UInt16
#define T_NAME(name) NAME(name##_f16)
#define BITS(v) __builtin_convertvector(v, IV)
#define READ(v)                                                                                                         \
    ((AV)((IV)((AV)((BITS(v) & 0x7fff) << 13) * 0x1p112f) | (((BITS(v) & 0x7c00) == 0x7c00) & 0x7f800000) |              \
          ((BITS(v) & 0x8000) << 16)))
#include "decode.h"
#undef BITS

#undef A
#undef I
#define A double
#define I int64_t
#define T Float64
#define T_NAME(name) NAME(name##_f64)
#define READ(v) (v)
#define DIRECT
#include "decode.h"
#undef DIRECT

#undef A
#undef W
#undef I
#undef OTHER_THAN

#define T Int8
#define T_NAME(name) NAME(name##_i8)
#include "integers.h"
#define T UInt8
#define T_NAME(name) NAME(name##_u8)
#include "integers.h"
#define T Int16
#define T_NAME(name) NAME(name##_i16)
#include "integers.h"
#define T Int32
#define T_NAME(name) NAME(name##_i32)
#include "integers.h"
#define T Int64
#define T_NAME(name) NAME(name##_i64)
#include "integers.h"

#define OF_FLOATS(name) NAME(name##_f32), NAME(name##_f64), NAME(name##_f16), NAME(name##_bf16)
#define OF_INTEGERS(name) NAME(name##_i8), NAME(name##_u8), NAME(name##_i16), NAME(name##_i32), NAME(name##_i64)

typedef void (*NAME(Decode))(const Input *, int64_t, int64_t, const void *, int64_t, void *);
static const NAME(Decode) NAME(decoders)[] = {OF_FLOATS(decode)};

typedef void (*NAME(Sum))(const Input *, int, int, const void *, int64_t, int64_t, int64_t, void *, int64_t *);
static const NAME(Sum) NAME(adders)[] = {OF_FLOATS(sum), OF_INTEGERS(sum)};

typedef double (*NAME(Extreme))(const Input *, int, int64_t, int64_t);
static const NAME(Extreme) NAME(extremes)[] = {OF_FLOATS(extreme)};

typedef void (*NAME(Valid))(const Input *, int64_t, int64_t, uint8_t *);
static const NAME(Valid) NAME(validators)[] = {OF_FLOATS(valid), OF_INTEGERS(valid)};

#define A_NAME(name) NAME(name##_f)
#define A float
#define W double
#define I int32_t
#define IS_DOUBLE 0
#include "sums.h"
#include "blocks.h"
#undef A_NAME
#undef A
#undef W
#undef I
#undef IS_DOUBLE

#define A_NAME(name) NAME(name##_d)
#define A double
#define W double
#define I int64_t
#define IS_DOUBLE 1
#include "sums.h"
#include "blocks.h"
#undef A_NAME
#undef A
#undef W
#undef I
#undef IS_DOUBLE

#define A_NAME(name) NAME(name##_u)
#define A uint64_t
#define W uint64_t
#include "sums.h"
#undef A_NAME
#undef A
#undef W

/* --- what Python calls -------------------------------------------------------------------------------------------- */

typedef struct {
    const Input *in;
    uint8_t *out;
} NAME(ValidJob);

static void NAME(valid_body)(void *argument, int64_t from, int64_t to)
{
    NAME(ValidJob) *job = argument;
    const Input *in = job->in;
    int64_t first = from * PART, last = LEAST(to * PART, in->outer * in->reduced * in->inner);
    NAME(validators)[in->dtype](in, first, last - first, job->out + first);
}

/* Write 1 for each element that is not the excluded value, and kept by the mask if there is one; 0 for the others. */
EXPORT void NAME(gg_valid)(const Input *in, uint8_t *out);
void NAME(gg_valid)(const Input *in, uint8_t *out)
{
    NAME(ValidJob) job = {in, out};
    int64_t elements = in->outer * in->reduced * in->inner;
    run(NAME(valid_body), &job, (elements + PART - 1) / PART, elements, in->threads);
}

/* Add up what is kept of each slice (op ELEMENTS), its DIFFERENCES to `shift` or their SQUARES, divide that by the number
   kept less `correction` unless that is negative, and count it. `total` and `shift` are (outer, inner), of the decoded type; `count` may be NULL. Integers
   have ELEMENTS only. Returns how many slices keep nothing (0 if nothing is divided or
   counted), or -1 for lack of memory. */
EXPORT int64_t NAME(gg_sum)(const Input *given, int32_t op, const void *shift, double correction, void *total, int64_t *count);
int64_t NAME(gg_sum)(const Input *given, int32_t op, const void *shift, double correction, void *total, int64_t *count)
{
    Input in = *given;
    uint8_t *made = NULL;
    if (!in.mask && (op != ELEMENTS || (in.dtype != F32 && in.dtype != F64))) { /* only these need no mask */
        made = malloc(in.outer * in.reduced * in.inner + 1);
        if (!made)
            return -1;
        NAME(gg_valid)(&in, made);
        in.mask = made;
    }
    int64_t empty = in.dtype == F64    ? NAME(sum_d)(&in, op, shift, correction, total, count)
                    : in.dtype >= I8 ? NAME(sum_u)(&in, op, shift, correction, total, count)
                                     : NAME(sum_f)(&in, op, shift, correction, total, count);
    free(made);
    return empty;
}

/* --- reductions and gradients of floating dtypes ------------------------------------------------------------------- */

/* Call for the type that a dtype is computed with. */
#define COMPUTE(name, ...) (in->dtype == F64 ? NAME(name##_d)(__VA_ARGS__) : NAME(name##_f)(__VA_ARGS__))

/* The largest (op LARGEST) or smallest of what is kept of each slice, or how many of it EQUAL `own`. Returns how many results are those of an empty slice, or -1 for lack of memory. */
EXPORT int64_t NAME(gg_fold)(const Input *in, int32_t op, const void *own, void *out);
int64_t NAME(gg_fold)(const Input *in, int32_t op, const void *own, void *out)
{
    return COMPUTE(fold, in, op, own, out);
}

/* The logarithm of the sum of exponentials of each slice. Returns as gg_fold. */
EXPORT int64_t NAME(gg_logsumexp)(const Input *in, void *out);
int64_t NAME(gg_logsumexp)(const Input *in, void *out)
{
    return COMPUTE(logsumexp, in, out);
}

/* The first element of each slice that is kept and equals `own`, -1 if there is none. */
EXPORT void NAME(gg_find)(const Input *in, const void *own, int64_t *index);
void NAME(gg_find)(const Input *in, const void *own, int64_t *index)
{
    int64_t tiles = (in->inner + TILE - 1) / TILE, elements = in->outer * in->reduced * in->inner;
    if (in->dtype == F64) {
        NAME(Find_d) job = {in, own, index, tiles};
        run(NAME(find_body_d), &job, in->outer * tiles, elements, in->threads);
    } else {
        NAME(Find_f) job = {in, own, index, tiles};
        run(NAME(find_body_f), &job, in->outer * tiles, elements, in->threads);
    }
}

/* For what the mask keeps: (x - own) * factor (op DISTANCES), factor where x equals own and 0 * factor elsewhere (SHARES),
   or exp(x - own) * factor (WEIGHTS); 0 for the rest. own and factor are (outer, inner). */
EXPORT void NAME(gg_map)(const Input *in, int32_t op, const void *own, const void *factor, void *out);
void NAME(gg_map)(const Input *in, int32_t op, const void *own, const void *factor, void *out)
{
    Cut cut = cut_of(in);
    int64_t units = in->outer * cut.parts * cut.tiles, elements = in->outer * in->reduced * in->inner;
    if (in->dtype == F64) {
        NAME(Map_d) job = {in, own, factor, out, cut, op};
        run(NAME(map_body_d), &job, units, elements, in->threads);
    } else {
        NAME(Map_f) job = {in, own, factor, out, cut, op};
        run(NAME(map_body_f), &job, units, elements, in->threads);
    }
}

/* The softmax of the rows of x (outer, reduced, 1), or its logarithm; with `gradient`, what goes back through `result`. */
EXPORT void NAME(gg_softmax)(const Input *in, int32_t logarithm, const void *result, const void *gradient, void *out);
void NAME(gg_softmax)(const Input *in, int32_t logarithm, const void *result, const void *gradient, void *out)
{
    int64_t elements = in->outer * in->reduced;
    if (in->dtype == F64) {
        NAME(Softmax_d) job = {in, out, result, gradient, logarithm};
        run(gradient ? NAME(softmax_backward_body_d) : NAME(softmax_body_d), &job, in->outer, elements, in->threads);
    } else {
        NAME(Softmax_f) job = {in, out, result, gradient, logarithm};
        run(gradient ? NAME(softmax_backward_body_f) : NAME(softmax_body_f), &job, in->outer, elements, in->threads);
    }
}

/* --- copies ------------------------------------------------------------------------------------------------------- */

#define E uint8_t
#define E_NAME(name) NAME(name##_1)
#include "copies.h"
#define E uint16_t
#define E_NAME(name) NAME(name##_2)
#include "copies.h"
#define E uint32_t
#define E_NAME(name) NAME(name##_4)
#include "copies.h"
#define E uint64_t
#define E_NAME(name) NAME(name##_8)
#include "copies.h"
#define E unsigned __int128
#define E_NAME(name) NAME(name##_16)
#include "copies.h"

#define OF_SIZES(name) {NAME(name##_1), NAME(name##_2), NAME(name##_4), NAME(name##_8), NAME(name##_16)}

typedef void (*NAME(Fill))(const void *, const uint8_t *, const void *, int64_t, void *);
static const NAME(Fill) NAME(fillers)[] = OF_SIZES(fill);
typedef void (*NAME(Spread))(const uint8_t *, const void *, int64_t, void *);
static const NAME(Spread) NAME(spreaders)[] = OF_SIZES(spread);

typedef struct {
    const char *x;
    const uint8_t *mask;
    const char *value;
    char *out;
    int64_t outer, reduced, inner, elements;
    int32_t size;
} NAME(Copy);

static void NAME(fill_body)(void *argument, int64_t from, int64_t to)
{
    NAME(Copy) *job = argument;
    int64_t first = from * PART, n = LEAST(to * PART, job->elements) - first, bytes = first * job->size;
    NAME(fillers)[__builtin_ctz(job->size)](job->x + bytes, job->mask + first, job->value, n, job->out + bytes);
}

/* Copy n elements of `size` bytes, and write a value where the mask keeps none. */
EXPORT void NAME(gg_fill)(const void *x, const uint8_t *mask, const void *value, int64_t n, int32_t size, void *out,
                          int32_t threads);
void NAME(gg_fill)(const void *x, const uint8_t *mask, const void *value, int64_t n, int32_t size, void *out,
                   int32_t threads)
{
    NAME(Copy) job = {.x = x, .mask = mask, .value = value, .out = out, .elements = n, .size = size};
    run(NAME(fill_body), &job, (n + PART - 1) / PART, n, threads);
}

static void NAME(expand_body)(void *argument, int64_t from, int64_t to)
{
    NAME(Copy) *job = argument;
    const int64_t size = job->size, inner = job->inner;
    static const uint64_t zero[2] = {0, 0};
    if (inner == 1)
        for (int64_t unit = from; unit < to; unit++) { /* a part of a row */
            int64_t parts = (job->reduced + PART - 1) / PART, o = unit / parts, first = unit % parts * PART;
            int64_t offset = o * job->reduced + first, n = LEAST(job->reduced - first, PART);
            NAME(spreaders)[__builtin_ctz(size)](job->mask + offset, job->value + o * size, n, job->out + offset * size);
        }
    else
        for (int64_t unit = from; unit < to; unit++) { /* a row of columns */
            int64_t offset = unit * inner, o = unit / job->reduced;
            NAME(fillers)[__builtin_ctz(size)](job->value + o * inner * size, job->mask + offset, zero, inner,
                                               job->out + offset * size);
        }
}

/* Give each element of (outer, reduced, inner) that the mask keeps the value of its slice, and 0 to the others. */
EXPORT void NAME(gg_expand)(const void *slices, const uint8_t *mask, int64_t outer, int64_t reduced, int64_t inner,
                            int32_t size, void *out, int32_t threads);
void NAME(gg_expand)(const void *slices, const uint8_t *mask, int64_t outer, int64_t reduced, int64_t inner, int32_t size,
                     void *out, int32_t threads)
{
    NAME(Copy) job = {.mask = mask, .value = slices, .out = out, .outer = outer, .reduced = reduced, .inner = inner};
    job.size = size;
    int64_t units = inner == 1 ? outer * ((reduced + PART - 1) / PART) : outer * reduced;
    run(NAME(expand_body), &job, units, outer * reduced * inner, threads);
}

/* Count the bytes of (outer, reduced, inner) that are not 0, for each slice. */
PLAIN_LOOPS static void NAME(count_body)(void *argument, int64_t from, int64_t to)
{
    NAME(Copy) *job = argument;
    int64_t *out = (int64_t *)job->out + from * job->inner;
    const uint8_t *mask = job->mask + from * job->reduced * job->inner;
    for (int64_t o = from; o < to; o++, out += job->inner)
        if (job->inner == 1)
            for (*out = 0; mask < job->mask + (o + 1) * job->reduced;) {
                int64_t n = LEAST(job->mask + (o + 1) * job->reduced - mask, PART);
                uint32_t number = 0;
                for (int64_t i = 0; i < n; i++)
                    number += mask[i] != 0;
                *out += number;
                mask += n;
            }
        else {
            memset(out, 0, job->inner * sizeof *out);
            for (int64_t row = 0; row < job->reduced; row++, mask += job->inner)
                for (int64_t i = 0; i < job->inner; i++)
                    out[i] += mask[i] != 0;
        }
}

EXPORT void NAME(gg_count)(const uint8_t *mask, int64_t outer, int64_t reduced, int64_t inner, int64_t *out,
                           int32_t threads);
void NAME(gg_count)(const uint8_t *mask, int64_t outer, int64_t reduced, int64_t inner, int64_t *out, int32_t threads)
{
    NAME(Copy) job = {.mask = mask, .out = (char *)out, .outer = outer, .reduced = reduced, .inner = inner};
    run(NAME(count_body), &job, outer, outer * reduced * inner, threads);
}

/* --- the mode ----------------------------------------------------------------------------------------------------- */

#define U uint8_t
#define U_NAME(name) NAME(name##_1u)
#include "votes.h"
#define U uint16_t
#define U_NAME(name) NAME(name##_2u)
#include "votes.h"
#define U uint32_t
#define U_NAME(name) NAME(name##_4u)
#include "votes.h"
#define U uint64_t
#define U_NAME(name) NAME(name##_8u)
#include "votes.h"

typedef void (*NAME(Vote))(const void *, int64_t, int64_t, int64_t *, int64_t *);
static const NAME(Vote) NAME(votes)[] = {NAME(vote_1u), NAME(vote_2u), NAME(vote_4u), NAME(vote_8u)};

INLINE uint64_t NAME(code_of_float)(float x)
{
    uint32_t bits;
    x = x + 0.0f; /* -0.0 becomes 0.0 */
    memcpy(&bits, &x, 4);
    return x != x ? UINT32_MAX : bits >> 31 ? ~bits : bits | 0x80000000u;
}

INLINE uint64_t NAME(code_of_double)(double x)
{
    uint64_t bits;
    x = x + 0.0;
    memcpy(&bits, &x, 8);
    return x != x ? UINT64_MAX : bits >> 63 ? ~bits : bits | 0x8000000000000000u;
}

#define T Float32
#define T_NAME(name) NAME(name##_f32)
#define CODE(e) NAME(code_of_float)(e)
#include "mode.h"
#undef T
#undef CODE
#define T Float64
#define T_NAME(name) NAME(name##_f64)
#define CODE(e) NAME(code_of_double)(e)
#include "mode.h"
#undef T
#undef CODE
/* Halves are ordered by their bits; `special` are the bits of infinity, above which is NaN. */
#define HALF_CODE(e, special)                                                                                           \
    (((e) & 0x7fff) > (special) ? 0xffffu : ((e) & 0x7fff) == 0 ? 0x8000u : (e) >> 15 ? 0xffffu & ~(e) : (e) | 0x8000u)
#define T UInt16
#define T_NAME(name) NAME(name##_f16)
#define CODE(e) HALF_CODE(e, 0x7c00)
#include "mode.h"
#undef CODE
#define T_NAME(name) NAME(name##_bf16)
#define CODE(e) HALF_CODE(e, 0x7f80)
#include "mode.h"
#undef T
#undef CODE
#define CODE(e) ((uint64_t)(int64_t)(e) ^ 0x8000000000000000u)
#define T Int8
#define T_NAME(name) NAME(name##_i8)
#include "mode.h"
#undef T
#define T UInt8
#define T_NAME(name) NAME(name##_u8)
#include "mode.h"
#undef T
#define T Int16
#define T_NAME(name) NAME(name##_i16)
#include "mode.h"
#undef T
#define T Int32
#define T_NAME(name) NAME(name##_i32)
#include "mode.h"
#undef T
#define T Int64
#define T_NAME(name) NAME(name##_i64)
#include "mode.h"
#undef T
#undef CODE

typedef void (*NAME(Codes))(const Input *, int64_t, int64_t, int64_t, uint64_t *);
static const NAME(Codes) NAME(coders)[] = {OF_FLOATS(codes), OF_INTEGERS(codes)};

typedef struct {
    uint64_t *codes, *kept, *keys; /* of all elements of a slice and of the kept ones; of the slots of a table */
    uint32_t *counts;              /* of the slots of a table, or of bins */
    uint64_t bins;
} NAME(ModeSpace);

/* Find the smallest of the most frequent kept codes of a slice, its last place, and how often it is. */
static void NAME(mode_slice)(const Input *in, int64_t offset, NAME(ModeSpace) *space, int64_t *index, int64_t *count)
{
    const int64_t stride = in->inner;
    const uint8_t *mask = AT(in->mask, offset);
    const uint64_t *codes = space->codes;
    uint64_t least = UINT64_MAX, most = 0, best = 0, top = 0;
    uint32_t *counts = space->counts;
    int64_t kept = 0, last = in->reduced - 1;
    NAME(coders)[in->dtype](in, offset, stride, in->reduced, space->codes);
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

/* Do the same for neighbouring slices of no more than FEW elements: codes as narrow as their range allows, compared in
   pairs, many slices at a time. */
PLAIN_LOOPS static void NAME(mode_votes)(const Input *in, int64_t slice, int64_t many, int64_t *index, int64_t *count)
{
    uint64_t wide[FEW * VOTES], least = UINT64_MAX, most = 0;
    uint64_t narrow[FEW * VOTES] ALIGNED;
    uint8_t taken[FEW * VOTES];
    const int64_t n = in->reduced, step = in->inner > 1 ? in->inner : 1, next = in->inner > 1 ? 1 : n;
    const int64_t offset = slice / in->inner * in->inner * n + slice % in->inner;
    memset(taken, 1, sizeof taken);
    for (int64_t r = 0; r < n; r++) {
        uint64_t *codes = wide + r * VOTES;
        uint8_t *take = taken + r * VOTES;
        NAME(coders)[in->dtype](in, offset + r * step, next, many, codes);
        if (in->mask)
            for (int64_t s = 0; s < many; s++)
                take[s] = in->mask[offset + r * step + s * next] != 0;
        for (int64_t s = 0; s < many; s++) {
            uint64_t low = take[s] ? codes[s] : UINT64_MAX, high = take[s] ? codes[s] : 0;
            least = low < least ? low : least;
            most = high > most ? high : most;
        }
    }
    /* Codes count from 1; what is left out becomes 0, which none of the kept equals. */
    const uint64_t range = most < least ? 0 : most - least;
    if (range == UINT64_MAX) { /* there is no number left for what is left out */
        for (int64_t s = 0; s < many; s++) {
            index[s] = -1;
            count[s] = 0;
            for (int64_t r = 0; r < n; r++) {
                int64_t times = 0;
                for (int64_t before = 0; before <= r; before++)
                    times += taken[before * VOTES + s] && wide[before * VOTES + s] == wide[r * VOTES + s];
                if (taken[r * VOTES + s] && (times > count[s] || (times == count[s] &&
                                                                  wide[r * VOTES + s] <= wide[index[s] * VOTES + s]))) {
                    index[s] = r;
                    count[s] = times;
                }
            }
        }
        return;
    }
    const int size = range < UINT8_MAX ? 0 : range < UINT16_MAX ? 1 : range < UINT32_MAX ? 2 : 3;
#define NARROW(U)                                                                                                       \
    for (int64_t i = 0; i < many; i++)                                                                                  \
        ((U *)narrow)[r * VOTES + i] = (U)(codes[i] - least + 1) & (U)-(U)take[i];
    for (int64_t r = 0; r < n; r++) {
        const uint64_t *codes = wide + r * VOTES;
        const uint8_t *take = taken + r * VOTES;
        if (size == 0)
            NARROW(uint8_t)
        else if (size == 1)
            NARROW(uint16_t)
        else if (size == 2)
            NARROW(uint32_t)
        else
            NARROW(uint64_t)
    }
#undef NARROW
    NAME(votes)[size](narrow, n, many, index, count);
}

typedef struct {
    const Input *in;
    int64_t *index, *count;
    int failed;
} NAME(ModeJob);

/* The units are groups of VOTES neighbouring slices, or single slices. */
static void NAME(mode_body)(void *argument, int64_t from, int64_t to)
{
    NAME(ModeJob) *job = argument;
    const Input *in = job->in;
    const int64_t n = in->reduced;
    if (n <= FEW) {
        const int64_t row = in->inner > 1 ? in->inner : in->outer, groups = (row + VOTES - 1) / VOTES;
        for (int64_t unit = from; unit < to; unit++) {
            int64_t first = unit % groups * VOTES, slice = unit / groups * row + first;
            NAME(mode_votes)(in, slice, LEAST(row - first, VOTES), job->index + slice, job->count + slice);
        }
        return;
    }
    uint64_t slots = 4;
    while (slots < 2 * (uint64_t)n)
        slots *= 2;
    NAME(ModeSpace) space = {.bins = slots < 256 ? 256 : slots};
    space.codes = malloc(n * sizeof(uint64_t));
    space.kept = malloc(n * sizeof(uint64_t));
    space.keys = malloc(slots * sizeof(uint64_t));
    space.counts = malloc(space.bins * sizeof(uint32_t));
    if (space.codes && space.kept && space.keys && space.counts)
        for (int64_t slice = from; slice < to; slice++)
            NAME(mode_slice)(in, slice / in->inner * in->inner * n + slice % in->inner, &space, job->index + slice,
                             job->count + slice);
    else
        job->failed = 1;
    free(space.codes);
    free(space.kept);
    free(space.keys);
    free(space.counts);
}

/* The last kept element with the smallest of the most frequent values of each slice, -1 if nothing is kept, and how often
   the value is kept. Returns how many slices keep nothing, or -1 for lack of memory. */
EXPORT int64_t NAME(gg_mode)(const Input *in, int64_t *index, int64_t *count);
int64_t NAME(gg_mode)(const Input *in, int64_t *index, int64_t *count)
{
    NAME(ModeJob) job = {in, index, count, 0};
    int64_t slices = in->outer * in->inner, empty = 0, row = in->inner > 1 ? in->inner : in->outer;
    if (slices == 0)
        return 0;
    int64_t units = in->reduced <= FEW ? slices / row * ((row + VOTES - 1) / VOTES) : slices;
    run(NAME(mode_body), &job, units, slices * in->reduced, in->threads);
    for (int64_t i = 0; i < slices; i++)
        empty += count[i] == 0;
    return job.failed ? -1 : empty;
}

#include "words.h"

/* The first kept element of each slice, 0 if there is none; in->mask is given. */
EXPORT void NAME(gg_first)(const Input *in, void *out);
void NAME(gg_first)(const Input *in, void *out)
{
    Input plain = *in;
    plain.mask = NULL;
    plain.value = NAN;
    for (int64_t slice = 0; slice < in->outer * in->inner; slice++) {
        int64_t offset = slice / in->inner * in->reduced * in->inner + slice % in->inner, row = 0;
        double number = 0, zeros[4] = {0};
        float small = 0;
        while (row < in->reduced && !in->mask[offset + row * in->inner])
            row++;
        if (row < in->reduced)
            NAME(decoders)[in->dtype](&plain, offset + row * in->inner, 1, zeros, 0, in->dtype == F64 ? (void *)&number : &small);
        if (in->dtype == F64)
            ((double *)out)[slice] = number;
        else
            ((float *)out)[slice] = small;
    }
}
