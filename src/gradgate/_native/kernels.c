/* The native kernels of gradgate: masked reductions and their gradients on the CPU.

   Plain C11 with the vector types of GCC and clang; no header of torch or Python. `_kernels.py` calls it through ctypes.

   Layout. A tensor is (outer, reduced, inner), contiguous; a slice is x[o, :, i]. A mask has one byte for each element,
   and any byte but 0 keeps it. Without a mask, what is kept is what differs from one value, which may be NaN.

   Blocks. `decode` reads a block of any dtype and writes it as numbers to compute with (float32 for halves), with a fill
   value where an element is left out; all arithmetic is done on decoded blocks, so what is left out is read and never
   used. That is why only `decode` and its kin exist for each dtype. Every sum is cut into the same blocks and added in the
   same order whatever the vector width of the processor and the number of threads, so that neither changes a bit.

   Files. `decode.h` is included once for each floating dtype, `integers.h` for each other one, `reduce.h` once for each type that is computed with. The build compiles
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

enum { BY_MASK, BY_NAN, BY_VALUE }; /* what says that an element is left out */

enum { F32, F64, F16, BF16, I8, U8, I16, I32, I64 }; /* the order of _kernels.py */

enum { VECTOR = 32 };     /* bytes of a vector */
enum { BLOCK = 1024 };    /* elements that are decoded at a time */
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

/* --- the level of the processor ----------------------------------------------------------------------------------- */

#if LEVEL == 0
EXPORT int32_t gg_version(void);
int32_t gg_version(void)
{
    return GRADGATE_KERNELS;
}

/* The highest level that this processor runs: 0 baseline, 1 AVX2, 2 AVX-512. */
EXPORT int32_t gg_level(void);
int32_t gg_level(void)
{
#ifdef __x86_64__
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return 2;
    if (__builtin_cpu_supports("avx2"))
        return 1;
#endif
    return 0;
}
#endif

#define NAME(name) JOIN(name, LEVEL)

typedef int32_t Int8 __attribute__((vector_size(VECTOR), aligned(4), may_alias)); /* eight lanes, four lanes */
typedef int64_t Int4 __attribute__((vector_size(VECTOR), aligned(8), may_alias));
typedef int8_t Byte8 __attribute__((vector_size(8), aligned(1), may_alias));
typedef int8_t Byte4 __attribute__((vector_size(4), aligned(1), may_alias));

/* Bytes of a mask to lanes, -1 where an element is left out; and lanes of 0 and -1 to bytes of 0 and 1. Compilers do not find the instructions by themselves. */

INLINE Int8 int32_t_left(const uint8_t *mask)
{
#ifdef __AVX2__
    return (Int8)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)mask)) == 0;
#else
    return __builtin_convertvector(*(const Byte8 *)mask, Int8) == 0;
#endif
}

INLINE Int4 int64_t_left(const uint8_t *mask)
{
#ifdef __AVX2__
    int32_t four;
    memcpy(&four, mask, 4);
    return (Int4)_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four)) == 0;
#else
    return __builtin_convertvector(*(const Byte4 *)mask, Int4) == 0;
#endif
}

INLINE void int32_t_store(uint8_t *out, Int8 take)
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

INLINE void int64_t_store(uint8_t *out, Int4 take)
{
#ifdef __AVX2__
    uint32_t bytes = (uint32_t)_mm256_movemask_pd((__m256d)take) * 0x204081 & 0x1010101;
    memcpy(out, &bytes, 4);
#else
    *(Byte4 *)out = __builtin_convertvector(-take, Byte4);
#endif
}
#define LEFT(mask) JOIN(I, left)(mask)
#define STORE_KEPT(out, take) JOIN(I, store)(out, take)

/* For an element or a vector of them: NaN is other than any number, and not other than NaN. */
#define OTHER_THAN(e, value) (((e) != (value)) & (((e) == (e)) | -((value) == (value))))
#define A float
#define W double
#define I int32_t

#define T float
#define T_NAME(name) NAME(name##_f32)
#define READ(v) (v)
#define DIRECT
#include "decode.h"
#undef DIRECT

#define T uint16_t /* the upper half of a float32 */
#define T_NAME(name) NAME(name##_bf16)
#define READ(v) ((AV)(__builtin_convertvector(v, IV) << 16))
#include "decode.h"

/* The exponents of a float16 and a float32 differ by 112 in their bias; a multiplication makes subnormals right too. */
#define T uint16_t
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
#define T double
#define T_NAME(name) NAME(name##_f64)
#define READ(v) (v)
#define DIRECT
#include "decode.h"
#undef DIRECT

#undef A
#undef W
#undef I
#undef OTHER_THAN

#define T int8_t
#define T_NAME(name) NAME(name##_i8)
#include "integers.h"
#define T uint8_t
#define T_NAME(name) NAME(name##_u8)
#include "integers.h"
#define T int16_t
#define T_NAME(name) NAME(name##_i16)
#include "integers.h"
#define T int32_t
#define T_NAME(name) NAME(name##_i32)
#include "integers.h"
#define T int64_t
#define T_NAME(name) NAME(name##_i64)
#include "integers.h"

#define OF_FLOATS(name) NAME(name##_f32), NAME(name##_f64), NAME(name##_f16), NAME(name##_bf16)
#define OF_INTEGERS(name) NAME(name##_i8), NAME(name##_u8), NAME(name##_i16), NAME(name##_i32), NAME(name##_i64)

typedef int64_t (*NAME(Decode))(const Input *, const uint8_t *, int64_t, int64_t, const void *, void *);
static const NAME(Decode) NAME(decoders)[] __attribute__((unused)) = {OF_FLOATS(decode)};

typedef void (*NAME(Sum))(const Input *, int, int64_t, int64_t, int64_t, void *, int64_t *);
static const NAME(Sum) NAME(adders)[] = {OF_FLOATS(sum), OF_INTEGERS(sum)};

typedef void (*NAME(Valid))(const Input *, int64_t, int64_t, uint8_t *);
static const NAME(Valid) NAME(validators)[] = {OF_FLOATS(valid), OF_INTEGERS(valid)};

#define A_NAME(name) NAME(name##_f)
#define A float
#define W double
#define I int32_t
#include "reduce.h"
#define A_NAME(name) NAME(name##_d)
#define A double
#define W double
#define I int64_t
#include "reduce.h"
#define A_NAME(name) NAME(name##_u)
#define A uint64_t
#define W uint64_t
#define I int64_t
#include "reduce.h"

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

/* Add up what is kept of each slice, or give its mean, and count it. `total` is (outer, inner), of the decoded type;
   `count` may be NULL. Returns how many slices keep nothing, or -1 for lack of memory. */
EXPORT int64_t NAME(gg_sum)(const Input *given, int32_t mean, void *total, int64_t *count);
int64_t NAME(gg_sum)(const Input *given, int32_t mean, void *total, int64_t *count)
{
    Input in = *given;
    uint8_t *made = NULL;
    if (!in.mask && in.dtype != F32 && in.dtype != F64) { /* only these have sums without a mask */
        made = malloc(in.outer * in.reduced * in.inner + 1);
        if (!made)
            return -1;
        NAME(gg_valid)(&in, made);
        in.mask = made;
    }
    int64_t empty = in.dtype == F64    ? NAME(sum_d)(&in, mean, total, count)
                    : in.dtype >= I8 ? NAME(sum_u)(&in, mean, total, count)
                                     : NAME(sum_f)(&in, mean, total, count);
    free(made);
    return empty;
}

#include "words.h"
