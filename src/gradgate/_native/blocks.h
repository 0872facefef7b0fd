/* Reductions and gradients by decoded blocks, for one type A that is computed with (I is the integer as wide); see
   kernels.c. Slices are the rows of a tensor with inner == 1, and columns otherwise. */

#define LANES (VECTOR / (int64_t)sizeof(A))
#define AV A_NAME(Av)
#define IV A_NAME(Iv)
typedef A AV __attribute__((vector_size(VECTOR), aligned(1), may_alias));
typedef I IV __attribute__((vector_size(VECTOR), aligned(1), may_alias));
#define CHOOSE(condition, a, b) ((AV)(((IV)(a) & (IV)(condition)) | ((IV)(b) & ~(IV)(condition))))
#define ALL_LANES(number) ((AV){0} + (A)(number))
#define VECTORS(n) (((n) + LANES - 1) / LANES)

/* The exponential of numbers that are not above 0, within two units in the last place; 0 where it would be subnormal. */
INLINE AV A_NAME(exp)(AV x)
{
#if IS_DOUBLE
    const AV shift = ALL_LANES(0x1.8p52);
    const double high = 0x1.62e42fefa3800p-1, low = 0x1.ef35793c76730p-45;
    const IV tiny = x < -708.0;
#else
    const AV shift = ALL_LANES(0x1.8p23f);
    const float high = 0x1.62e400p-1f, low = 0x1.7f7d1cp-20f;
    const IV tiny = x < -87.0f;
#endif
    x = (AV)((IV)x & ~tiny);
    AV t = x * (A)1.44269504088896340736 + shift; /* the last bits of t are the integer next to it */
    AV n = t - shift, r = (x - n * high) - n * low;
#if IS_DOUBLE
    AV p = r * (1.0 / 6227020800) + 1.0 / 479001600;
    p = ((p * r + 1.0 / 39916800) * r + 1.0 / 3628800) * r + 1.0 / 362880;
    p = ((p * r + 1.0 / 40320) * r + 1.0 / 5040) * r + 1.0 / 720;
    p = ((p * r + 1.0 / 120) * r + 1.0 / 24) * r + 1.0 / 6;
#else
    AV p = ((r * (1.0f / 5040) + 1.0f / 720) * r + 1.0f / 120) * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
#endif
    p = ((p * r + (A)0.5) * r + 1) * r + 1;
    IV scale = ((IV)t - (IV)shift + (IS_DOUBLE ? 1023 : 127)) << (IS_DOUBLE ? 52 : 23);
    return (AV)((IV)(p * (AV)scale) & ~tiny);
}

/* --- reductions --------------------------------------------------------------------------------------------------- */

/* Take a block into as many lanes; `own` is the number of its slice (the mean, the largest), one for all if each is 0. */
INLINE void A_NAME(take)(int op, const A *block, int64_t n, const A *own, int64_t each, A *lanes)
{
    for (int64_t i = 0; i < n; i += LANES) {
        AV v = *(const AV *)(block + i), *lane = (AV *)(lanes + i), p = *(const AV *)(own + (i & each));
        if (op == LARGEST) /* NaN comes in, and stays */
            *lane = CHOOSE((IV)(v > *lane) | (IV)(v != v), v, *lane);
        else if (op == SMALLEST)
            *lane = CHOOSE((IV)(v < *lane) | (IV)(v != v), v, *lane);
        else if (op == EXPONENTIALS)
            *lane += A_NAME(exp)(v - p);
        else /* EQUALS */
            *lane += (AV)((IV)ALL_LANES(1) & (IV)(v == p));
    }
}

INLINE A A_NAME(start)(int op)
{
    return op == LARGEST ? -(A)INFINITY : op == SMALLEST ? (A)INFINITY : 0;
}

/* What stands for the left-out, so that it adds nothing. */
INLINE A A_NAME(nothing)(int op)
{
    return op == LARGEST || op == EXPONENTIALS ? -(A)INFINITY : op == SMALLEST ? (A)INFINITY : (A)NAN;
}

INLINE double A_NAME(both)(int op, double a, double b)
{
    if (op == LARGEST)
        return b != b || b > a ? b : a;
    if (op == SMALLEST)
        return b != b || b < a ? b : a;
    return a + b;
}

INLINE double A_NAME(fold_row)(int op, const Input *in, int64_t offset, int64_t n, A own)
{
    if (op == LARGEST || op == SMALLEST)
        return NAME(extremes)[in->dtype](in, op == LARGEST, offset, n);
    A block[BLOCK] ALIGNED, lanes[BLOCK] ALIGNED;
    const int64_t vectors = VECTORS(LEAST(n, BLOCK));
    const AV first = ALL_LANES(A_NAME(start)(op)), fill = ALL_LANES(A_NAME(nothing)(op)), owns = ALL_LANES(own);
    double result = A_NAME(start)(op);
    for (int64_t i = 0; i < n;) {
        for (int64_t k = 0; k < vectors; k++)
            ((AV *)lanes)[k] = first;
        for (int64_t step = 0; step < 64 && i < n; step++, i += BLOCK) {
            int64_t size = LEAST(n - i, BLOCK);
            NAME(decoders)[in->dtype](in, offset + i, size, &fill, 0, block);
            for (int64_t k = size; k % LANES; k++)
                block[k] = fill[0];
            A_NAME(take)(op, block, size, (const A *)&owns, 0, lanes);
        }
        AV all = first;
        for (int64_t k = 0; k < vectors; k++) {
            AV v = ((AV *)lanes)[k];
            all += v;
        }
        for (int64_t lane = 0; lane < LANES; lane++)
            result = A_NAME(both)(op, result, all[lane]);
    }
    return result;
}

INLINE void A_NAME(fold_columns)(int op, const Input *in, int64_t offset, int64_t n, int64_t width, const A *own,
                                 double *results)
{
    A block[TILE] ALIGNED, lanes[TILE] ALIGNED, fill[TILE] ALIGNED, owns[TILE] ALIGNED;
    for (int64_t c = 0; c < VECTORS(width) * LANES; c++) {
        owns[c] = own && c < width ? own[c] : 0;
        fill[c] = block[c] = A_NAME(nothing)(op);
    }
    for (int64_t c = 0; c < width; c++)
        results[c] = A_NAME(start)(op);
    for (int64_t row = 0; row < n;) {
        for (int64_t c = 0; c < VECTORS(width) * LANES; c++)
            lanes[c] = A_NAME(start)(op);
        for (int64_t step = 0; step < 64 && row < n; step++, row++, offset += in->inner) {
            NAME(decoders)[in->dtype](in, offset, width, fill, -1, block);
            A_NAME(take)(op, block, width, owns, -1, lanes);
        }
        for (int64_t c = 0; c < width; c++)
            results[c] = A_NAME(both)(op, results[c], lanes[c]);
    }
}

typedef struct {
    const Input *in;
    const A *own;    /* (outer, inner), or NULL */
    double *results; /* (outer, parts, inner) */
    Cut cut;
    int op;
} A_NAME(Fold);

INLINE void A_NAME(fold_units)(int op, A_NAME(Fold) *job, int64_t from, int64_t to)
{
    const Input *in = job->in;
    for (int64_t unit = from; unit < to; unit++) {
        Piece p = piece_of(in, &job->cut, unit);
        const A *own = job->own ? job->own + p.slice : NULL;
        if (in->inner > 1)
            A_NAME(fold_columns)(op, in, p.offset, p.rows, p.width, own, job->results + p.result);
        else
            job->results[p.result] = A_NAME(fold_row)(op, in, p.offset, p.rows, own ? *own : 0);
    }
}

static void A_NAME(fold_body)(void *argument, int64_t from, int64_t to)
{
    A_NAME(Fold) *job = argument;
    switch (job->op) {
    case LARGEST: A_NAME(fold_units)(LARGEST, job, from, to); break;
    case SMALLEST: A_NAME(fold_units)(SMALLEST, job, from, to); break;
    case EXPONENTIALS: A_NAME(fold_units)(EXPONENTIALS, job, from, to); break;
    default: A_NAME(fold_units)(EQUALS, job, from, to);
    }
}

/* Reduce every slice. Returns how many results are what an empty slice gives, or -1 for lack of memory. */
static int64_t A_NAME(fold)(const Input *in, int op, const A *own, A *out)
{
    A_NAME(Fold) job = {.in = in, .own = own, .op = op, .cut = cut_of(in)};
    int64_t slices = in->outer * in->inner, parts = job.cut.parts, empty = 0;
    double only;
    if (slices == 0)
        return 0;
    job.results = slices * parts == 1 ? &only : malloc(slices * parts * sizeof(double));
    if (!job.results)
        return -1;
    run(A_NAME(fold_body), &job, in->outer * parts * job.cut.tiles, slices * in->reduced, in->threads);
    for (int64_t o = 0; o < in->outer; o++)
        for (int64_t i = 0; i < in->inner; i++) {
            double result = A_NAME(start)(op);
            for (int64_t part = 0; part < parts; part++)
                result = A_NAME(both)(op, result, job.results[(o * parts + part) * in->inner + i]);
            out[o * in->inner + i] = (A)result;
            empty += result == A_NAME(start)(op);
        }
    if (job.results != &only)
        free(job.results);
    return empty;
}

/* The logarithm of the sum of the exponentials, and the largest; tops is (outer, inner). */
static int64_t A_NAME(logsumexp)(const Input *in, A *out)
{
    int64_t slices = in->outer * in->inner, empty;
    A *tops = malloc(slices * sizeof(A) + 1);
    empty = tops ? A_NAME(fold)(in, LARGEST, NULL, tops) : -1;
    if (empty >= 0) {
        for (int64_t i = 0; i < slices; i++) /* inf - inf is no number */
            out[i] = tops[i] == -(A)INFINITY ? 0 : tops[i];
        A *totals = malloc(slices * sizeof(A) + 1);
        if (totals && A_NAME(fold)(in, EXPONENTIALS, out, totals) >= 0)
            for (int64_t i = 0; i < slices; i++)
                out[i] = tops[i] - tops[i] == 0 ? (A)(tops[i] + log((double)totals[i])) : tops[i];
        else
            empty = -1;
        free(totals);
    }
    free(tops);
    return empty;
}

typedef struct {
    const Input *in;
    const A *own;
    int64_t *index, tiles;
} A_NAME(Find);

/* Find the first element of each slice that is kept and equals its number, NaN for NaN; -1 if there is none. */
static void A_NAME(find_body)(void *argument, int64_t from, int64_t to)
{
    A_NAME(Find) *job = argument;
    const Input *in = job->in;
    const int64_t each = in->inner > 1 ? -1 : 0, step = each ? in->inner : BLOCK;
    A block[TILE] ALIGNED, fill[TILE] ALIGNED;
    for (int64_t unit = from; unit < to; unit++) {
        int64_t o = unit / job->tiles, column = unit % job->tiles * TILE, width = LEAST(in->inner - column, TILE);
        const A *own = job->own + o * in->inner + column;
        int64_t *index = job->index + o * in->inner + column, missing = width;
        for (int64_t c = 0; c < (each ? width : LANES); c++) /* what is left out must not equal */
            fill[c] = own[c & each] == 0;
        for (int64_t c = 0; c < width; c++)
            index[c] = -1;
        for (int64_t row = 0; row < in->reduced && missing; row += each ? 1 : step) {
            int64_t n = each ? width : LEAST(in->reduced - row, step);
            int64_t offset = (o * in->reduced + row) * in->inner + column;
            NAME(decoders)[in->dtype](in, offset, n, fill, each, block);
            for (int64_t c = 0; c < n; c++)
                if ((block[c] == own[c & each] || (block[c] != block[c] && own[c & each] != own[c & each])) &&
                    index[c & each] < 0) {
                    index[c & each] = each ? row : row + c;
                    missing--;
                }
        }
    }
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

typedef struct {
    const Input *in; /* with a mask */
    const A *own, *factor; /* (outer, inner) */
    A *out;
    Cut cut;
    int op;
} A_NAME(Map);

/* gg_map says what the ops are. */
INLINE void A_NAME(map_units)(int op, A_NAME(Map) *job, int64_t from, int64_t to)
{
    const Input *in = job->in;
    const int64_t each = in->inner > 1 ? -1 : 0;
    A block[TILE] ALIGNED, own[TILE] ALIGNED, factor[TILE] ALIGNED;
    for (int64_t unit = from; unit < to; unit++) {
        Piece p = piece_of(in, &job->cut, unit);
        for (int64_t c = 0; c < (each ? p.width : LANES); c++) {
            own[c] = job->own[p.slice + (c & each)];
            factor[c] = job->factor[p.slice + (c & each)];
        }
        for (int64_t row = 0; row < p.rows; row += each ? 1 : TILE) {
            int64_t n = each ? p.width : LEAST(p.rows - row, TILE), offset = p.offset + row * in->inner, i = 0;
            A *out = job->out + offset;
            NAME(decoders)[in->dtype](in, offset, n, own, each, block);
            for (; i + LANES <= n; i += LANES) {
                AV v = *(AV *)(block + i), q = *(AV *)(own + (i & each)), f = *(AV *)(factor + (i & each));
                AV result = op == DISTANCES ? (v - q) * f
                            : op == SHARES  ? (AV)((IV)ALL_LANES(1) & (IV)(v == q)) * f + 0
                                            : A_NAME(exp)(v - q) * f;
                *(AV *)(out + i) = (AV)((IV)result & ~(IV)LEFT(in->mask + offset + i));
            }
            for (; i < n; i++) {
                A q = own[i & each], f = factor[i & each];
                A result = op == DISTANCES ? (block[i] - q) * f
                           : op == SHARES  ? (block[i] == q) * f + 0
                                           : A_NAME(exp)(ALL_LANES(block[i] - q))[0] * f;
                out[i] = in->mask[offset + i] ? result : 0;
            }
        }
    }
}

static void A_NAME(map_body)(void *argument, int64_t from, int64_t to)
{
    A_NAME(Map) *job = argument;
    switch (job->op) {
    case DISTANCES: A_NAME(map_units)(DISTANCES, job, from, to); break;
    case SHARES: A_NAME(map_units)(SHARES, job, from, to); break;
    default: A_NAME(map_units)(WEIGHTS, job, from, to);
    }
}

/* --- softmax ------------------------------------------------------------------------------------------------------ */

typedef struct {
    const Input *in; /* rows */
    A *out;
    const A *result, *gradient; /* of the forward pass, and what arrives */
    int32_t logarithm;
} A_NAME(Softmax);

static void A_NAME(softmax_body)(void *argument, int64_t from, int64_t to)
{
    A_NAME(Softmax) *job = argument;
    const Input *in = job->in;
    const int64_t n = in->reduced;
    const AV none = ALL_LANES(-(A)INFINITY);
    A block[BLOCK] ALIGNED, kept[BLOCK] ALIGNED;
    for (int64_t row = from; row < to; row++) {
        A top = (A)A_NAME(fold_row)(LARGEST, in, row * n, n, 0), *out = job->out + row * n;
        A base = top == -(A)INFINITY ? 0 : top; /* inf - inf is no number */
        double total = 0;
        for (int64_t i = 0; i < n; i += BLOCK) {
            int64_t size = LEAST(n - i, BLOCK);
            NAME(decoders)[in->dtype](in, row * n + i, size, &none, 0, block);
            for (int64_t k = size; k % LANES; k++)
                block[k] = none[0];
            AV sum = {0};
            for (int64_t k = 0; k < size; k += LANES) {
                AV distance = *(AV *)(block + k) - base, e = A_NAME(exp)(distance);
                *(AV *)(kept + k) = job->logarithm ? distance : e;
                sum += e;
            }
            memcpy(out + i, kept, size * sizeof(A));
            for (int64_t lane = 0; lane < LANES; lane++)
                total += sum[lane];
        }
        if (top == -(A)INFINITY) /* nothing, or nothing but -inf: zeros, or -inf, stand there already */
            continue;
        A divisor = (A)(job->logarithm ? log(total) : 1 / total);
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES)
            *(AV *)(out + i) = job->logarithm ? *(AV *)(out + i) - divisor : *(AV *)(out + i) * divisor;
        for (; i < n; i++)
            out[i] = job->logarithm ? out[i] - divisor : out[i] * divisor;
        if (divisor != divisor || top != top || top == (A)INFINITY) /* NaN everywhere but where it is left out */
            for (i = 0; i < n; i++)
                if (in->mask ? !in->mask[row * n + i] : 0)
                    out[i] = job->logarithm ? none[0] : 0;
    }
}

static void A_NAME(softmax_backward_body)(void *argument, int64_t from, int64_t to)
{
    A_NAME(Softmax) *job = argument;
    const int64_t n = job->in->reduced;
    for (int64_t row = from; row < to; row++) {
        const A *y = job->result + row * n, *g = job->gradient + row * n;
        const uint8_t *mask = job->in->mask + row * n;
        A *out = job->out + row * n;
        double total = 0;
        int64_t weight = 0;
        for (int64_t start = 0; start < n; start += BLOCK) {
            AV sum = {0};
            IV some = {0};
            int64_t i = start, end = start + LEAST(n - start, BLOCK);
            for (; i + LANES <= end; i += LANES) {
                IV left = (IV)LEFT(mask + i);
                AV arriving = (AV)(*(const IV *)(g + i) & ~left), made = *(const AV *)(y + i);
                sum += job->logarithm ? arriving : (AV)((IV)(arriving * made) & ~left);
                some |= ~left & (job->logarithm ? (IV)(made != -(A)INFINITY) : (IV)(made != 0));
            }
            for (int64_t lane = 0; lane < LANES; lane++) {
                total += sum[lane];
                weight |= some[lane];
            }
            for (; i < end; i++)
                if (mask[i]) {
                    total += job->logarithm ? g[i] : g[i] * y[i];
                    weight |= job->logarithm ? y[i] != -(A)INFINITY : y[i] != 0;
                }
        }
        if (!weight) { /* a row of nothing but -inf takes nothing in */
            memset(out, 0, n * sizeof(A));
            continue;
        }
        A all = (A)total;
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES) {
            AV made = *(const AV *)(y + i), arriving = *(const AV *)(g + i);
            AV result = job->logarithm ? arriving - A_NAME(exp)(made) * all : made * (arriving - all);
            *(AV *)(out + i) = (AV)((IV)result & ~(IV)LEFT(mask + i));
        }
        for (; i < n; i++)
            out[i] = !mask[i] ? 0 : job->logarithm ? g[i] - A_NAME(exp)(ALL_LANES(y[i]))[0] * all : y[i] * (g[i] - all);
    }
}

#undef LANES
#undef AV
#undef IV
#undef CHOOSE
#undef ALL_LANES
#undef VECTORS
