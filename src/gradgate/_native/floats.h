/* Reductions and gradients for one type A that is computed with, and I, the integer as wide; see kernels.c. Slices are the
   rows of a tensor with inner == 1, and columns otherwise. */

#define LANES (VECTOR / (int64_t)sizeof(A))
#define AV F(Numbers)
#define IV F(Bits)
typedef A AV __attribute__((vector_size(VECTOR), aligned(1), may_alias));
typedef I IV __attribute__((vector_size(VECTOR), aligned(1), may_alias));
typedef A F(Any) ANYWHERE;
#define ALL(number) ((AV){0} + (A)(number))
#define SELECT(condition, a, b) ((AV)(((IV)(a) & (IV)(condition)) | ((IV)(b) & ~(IV)(condition))))
#define CLEARED(a, condition) ((AV)((IV)(a) & ~(IV)(condition)))
#define VECTORS(n) (((n) + LANES - 1) / LANES)
#define IS_EXTREME(op) ((op) == LARGEST || (op) == SMALLEST)
#define START(op) ((A)((op) == LARGEST ? -INFINITY : (op) == SMALLEST ? INFINITY : 0)) /* the result for nothing */

/* The exponential of numbers that are not above 0, within two units in the last place; 0 where it would be subnormal. */
INLINE AV F(exp)(AV x)
{
#if IS_DOUBLE
    const AV shift = ALL(0x1.8p52);
    const double high = 0x1.62e42fefa3800p-1, low = 0x1.ef35793c76730p-45;
    const IV tiny = x < -708.0;
#else
    const AV shift = ALL(0x1.8p23f);
    const float high = 0x1.62e400p-1f, low = 0x1.7f7d1cp-20f;
    const IV tiny = x < -87.0f;
#endif
    x = CLEARED(x, tiny);
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
    return CLEARED(p * (AV)scale, tiny);
}

/* --- a vector of elements; the last of a row is filled up with left-out ones --------------------------------------------------------------- */

INLINE AV F(load)(const F(Any) *x, int64_t n, A fill)
{
    if (n >= LANES)
        return *(const AV *)x;
    AV v = ALL(fill);
    memcpy(&v, x, n * sizeof(A));
    return v;
}

INLINE void F(store)(A *out, int64_t n, AV v)
{
    if (n >= LANES)
        *(AV *)out = v;
    else
        memcpy(out, &v, n * sizeof(A));
}

/* The first lanes. */
INLINE IV F(below)(int64_t n)
{
    IV lanes;
    for (int lane = 0; lane < LANES; lane++)
        lanes[lane] = lane;
    return lanes < (I)n;
}

/* Say, as 0 and -1, what is left out of LANES elements; `how` is known when this is compiled. */
INLINE IV F(left_out)(int how, AV v, const uint8_t *mask, int64_t n, A value)
{
    if (how != BY_MASK)
        return how == BY_NAN ? ~(IV)(v == v) : (IV)(v == value);
    if (n >= LANES)
        return F(left)(mask);
    uint8_t padded[LANES] = {0};
    memcpy(padded, mask, n);
    return F(left)(padded);
}

/* --- reductions ------------------------------------------------------------------------------------------------------ */

typedef struct {
    AV result;
    IV note; /* of an extreme: where NaN was among the kept; else less 1 for each that is left out, BY_NAN that is kept */
} F(State);

/* Two results as one; of NaN it is not said which. */
INLINE AV F(both)(int op, AV a, AV b)
{
    if (!IS_EXTREME(op))
        return a + b;
#ifdef __AVX2__
    return op == LARGEST ? LARGER(a, b) : SMALLER(a, b);
#else
    return SELECT(op == LARGEST ? b > a : b < a, b, a);
#endif
}

/* Take LANES elements in; `own` is a number of their slice: the mean, the largest. */
INLINE F(State) F(step)(int how, int op, F(State) s, AV v, IV left, AV own)
{
    if (IS_EXTREME(op) || op == EXPONENTIALS)
        v = SELECT(left, ALL(op == SMALLEST ? INFINITY : -INFINITY), v);
    else
        v = CLEARED(v, left);
    if (IS_EXTREME(op)) {
        s.note |= (IV)(v != v);
        s.result = F(both)(op, s.result, v);
        return s;
    }
    if (op == DIFFERENCES)
        v = CLEARED(v - own, left);
    else if (op == SQUARES)
        v = CLEARED((v - own) * (v - own), left);
    else if (op == EXPONENTIALS)
        v = F(exp)(v - own);
    else if (op == EQUALS)
        v = CLEARED((IV)ALL(1) & (IV)(v == own), left);
    s.result += v;
    s.note += how == BY_NAN ? ~left : left; /* what costs no instruction more */
    return s;
}

INLINE double F(either)(int op, double a, double b)
{
    if (IS_EXTREME(op))
        return b != b || (op == LARGEST ? b > a : b < a) ? b : a;
    return a + b;
}

/* Reduce the lanes of a vector, and add those of another up. */
INLINE double F(across)(int op, AV v)
{
#if !IS_DOUBLE
    if (!IS_EXTREME(op)) {
        const Doubles sums = __builtin_convertvector(*(Floats *)&v, Doubles) + __builtin_convertvector(*((Floats *)&v + 1), Doubles);
        return (sums[0] + sums[2]) + (sums[1] + sums[3]);
    }
#endif
    double result = v[0];
    for (int lane = 1; lane < LANES; lane++)
        result = F(either)(op, result, v[lane]);
    return result;
}

INLINE int64_t F(total)(IV v)
{
    int64_t total = 0;
    for (int lane = 0; lane < LANES / 2; lane++)
        total += v[lane] + v[lane + LANES / 2];
    return total;
}

INLINE double F(fold_row)(int how, int op, int counted, const Input *in, int64_t offset, int64_t n, A own, int64_t *count)
{
    double result = START(op);
    int64_t kept = 0;
    const AV owns = ALL(own);
    const A value = (A)in->value;
    A block[BLOCK] ALIGNED;
    for (int64_t first = 0; first < n; first += BLOCK) {
        const int64_t size = LEAST(n - first, BLOCK);
        const F(Any) *x = F(read)(in, offset + first, size, block);
        const uint8_t *mask = how == BY_MASK ? in->mask + offset + first : (const uint8_t *)x;
        int64_t i = 0;
        F(State) a = {ALL(START(op)), {0}}, b = a, c = a, d = a;
#define STEP(s, at, n, but)                                                                                             \
    {                                                                                                                   \
        AV v = F(load)(x + (at), n, value);                                                                             \
        s = F(step)(how, op, s, v, F(left_out)(how, v, mask + (at), n, value) | (but), owns);                           \
    }
        for (; op != EXPONENTIALS && i + 4 * LANES <= size; i += 4 * LANES) {
            STEP(a, i, LANES, 0)
            STEP(b, i + LANES, LANES, 0)
            STEP(c, i + 2 * LANES, LANES, 0)
            STEP(d, i + 3 * LANES, LANES, 0)
        }
        for (; i + LANES <= size; i += LANES)
            STEP(a, i, LANES, 0)
        if (i < size && size >= LANES) /* the last LANES, but those that are in */
            STEP(b, size - LANES, LANES, F(below)(LANES - (size - i)))
        else if (i < size)
            STEP(b, i, size - i, 0)
#undef STEP
        const AV all = F(both)(op, F(both)(op, a.result, b.result), F(both)(op, c.result, d.result));
        const int64_t note = F(total)((a.note + b.note) + (c.note + d.note));
        result = F(either)(op, result, IS_EXTREME(op) && note ? NAN : F(across)(op, all));
        kept += how == BY_NAN ? -note : VECTORS(size) * LANES + note;
    }
    if (counted)
        *count = kept;
    return result;
}

/* Take a few rows of columns in. */
INLINE void F(take_rows)(int how, int op, int64_t rows, const Input *in, int64_t offset, int64_t width, const A *own, A *block,
                         A *results, I *notes)
{
    const F(Any) *x = F(read)(in, offset, width, block);
    const int64_t inner = in->inner, stride = x == block ? TILE : inner;
    const uint8_t *mask = how == BY_MASK ? in->mask + offset : (const uint8_t *)x;
    const A value = (A)in->value;
    for (int64_t k = 1; k < rows && x == block; k++)
        F(read)(in, offset + k * inner, width, block + k * TILE);
    for (int64_t c = 0; c < width; c += LANES) {
        F(State) s = {ALL(START(op)), {0}};
        const AV owns = *(const AV *)(own + c);
#define STEP(k, n)                                                                                                      \
    {                                                                                                                   \
        AV v = F(load)(x + (k) * stride + c, n, value);                                                                 \
        s = F(step)(how, op, s, v, F(left_out)(how, v, mask + (k) * inner + c, n, value), owns);                             \
    }
        if (op != EXPONENTIALS && rows == ROWS && c + LANES <= width) {
            STEP(0, LANES)
            STEP(1, LANES)
            STEP(2, LANES)
            STEP(3, LANES)
        } else
            for (int64_t k = 0; k < rows; k++)
                STEP(k, width - c)
#undef STEP
        *(AV *)(results + c) = F(both)(op, *(AV *)(results + c), s.result);
        *(IV *)(notes + c) += s.note;
    }
}

INLINE void F(fold_columns)(int how, int op, const Input *in, int64_t offset, int64_t n, int64_t width, const A *own,
                            double *results, int64_t *counts)
{
    A lanes[TILE] ALIGNED, owns[TILE] ALIGNED, block[ROWS * TILE] ALIGNED;
    I notes[TILE] ALIGNED;
    for (int64_t c = 0; c < VECTORS(width) * LANES; c++)
        owns[c] = own && c < width ? own[c] : 0;
    for (int64_t c = 0; c < width; c++) {
        results[c] = START(op);
        counts[c] = 0;
    }
    for (int64_t row = 0; row < n;) {
        const int64_t end = LEAST(n, row + FLUSH), rows = end - row;
        for (int64_t c = 0; c < VECTORS(width) * LANES; c++) {
            lanes[c] = START(op);
            notes[c] = 0;
        }
        for (; row < end; row += ROWS)
            F(take_rows)(how, op, LEAST(end - row, ROWS), in, offset + row * in->inner, width, owns, block, lanes, notes);
        row = end;
        for (int64_t c = 0; c < width; c++) {
            results[c] = F(either)(op, results[c], IS_EXTREME(op) && notes[c] ? NAN : lanes[c]);
            counts[c] += how == BY_NAN ? -notes[c] : rows + notes[c];
        }
    }
}

typedef struct {
    const Input *in;
    const A *own;    /* (outer, inner), or NULL */
    A *out;          /* (outer, inner) */
    int64_t *count;  /* the same, or NULL */
    double *results; /* (outer, parts, inner), where slices have several parts */
    int64_t *counts;
    double correction;
    int64_t empty;
    Cut cut;
    int op, counted;
} F(Fold);

/* Write the result of a slice; say whether nothing is kept. */
INLINE int F(finish)(const F(Fold) *job, int op, int64_t slice, double result, int64_t number)
{
    const double divisor = (double)number - job->correction;
    job->out[slice] = (A)(job->correction < 0 ? result : result / (divisor > 0 ? divisor : 0));
    if (job->count)
        job->count[slice] = number;
    return IS_EXTREME(op) ? result == START(op) : job->counted && number == 0;
}

INLINE void F(fold_units)(int how, int op, int counted, F(Fold) *job, int64_t from, int64_t to)
{
    const Input *in = job->in;
    double results[TILE];
    int64_t counts[TILE], empty = 0;
    counts[0] = 0;
    for (int64_t unit = from; unit < to; unit++) {
        Piece p = piece_of(in, &job->cut, unit);
        const A *own = job->own ? job->own + p.slice : NULL;
        if (in->inner > 1)
            F(fold_columns)(how, op, in, p.offset, p.rows, p.width, own, results, counts);
        else
            *results = F(fold_row)(how, op, counted, in, p.offset, p.rows, own ? *own : 0, counts);
        if (job->cut.parts == 1)
            for (int64_t c = 0; c < p.width; c++)
                empty += F(finish)(job, op, p.slice + c, results[c], counts[c]);
        else {
            memcpy(job->results + p.result, results, p.width * sizeof *results);
            memcpy(job->counts + p.result, counts, p.width * sizeof *counts);
        }
    }
    __atomic_fetch_add(&job->empty, empty, __ATOMIC_RELAXED);
}

/* One function for each case: with all of them in one, the compiler takes longer. */
#define CASES(X)                                                                                                        \
    X(BY_VALUE, ELEMENTS, 1) X(BY_NAN, ELEMENTS, 0) X(BY_NAN, ELEMENTS, 1) X(BY_NAN, LARGEST, 1)                        \
    X(BY_NAN, SMALLEST, 1) X(BY_NAN, EXPONENTIALS, 1) X(BY_MASK, ELEMENTS, 0) X(BY_MASK, ELEMENTS, 1)                   \
    X(BY_MASK, LARGEST, 1) X(BY_MASK, SMALLEST, 1) X(BY_MASK, EXPONENTIALS, 1) X(BY_MASK, EQUALS, 1)                    \
    X(BY_MASK, DIFFERENCES, 1) X(BY_MASK, SQUARES, 1)
#define DEFINE(how, op, counted)                                                                                        \
    static __attribute__((noinline)) void F(fold_##how##_##op##_##counted)(F(Fold) *job, int64_t from, int64_t to)      \
    {                                                                                                                   \
        F(fold_units)(how, op, counted, job, from, to);                                                                 \
    }
#define CALL(by, reduction, counts)                                                                                     \
    if (how == by && job->op == reduction && job->counted <= counts)                                                    \
        return F(fold_##by##_##reduction##_##counts)(job, from, to);
CASES(DEFINE)

static void F(fold_body)(void *argument, int64_t from, int64_t to)
{
    F(Fold) *job = argument;
    const int how = job->in->mask ? BY_MASK : job->in->value == job->in->value ? BY_VALUE : BY_NAN;
    CASES(CALL)
}
#undef CASES
#undef DEFINE
#undef CALL

static int64_t F(fold)(const Input *in, int op, const A *own, double correction, A *out, int64_t *count)
{
    F(Fold) job = {.in = in, .own = own, .out = out, .count = count, .correction = correction, .op = op, .cut = cut_of(in),
                   .counted = count != NULL || correction >= 0};
    const int64_t slices = in->outer * in->inner, parts = job.cut.parts, many = parts == 1 ? 0 : slices * parts;
    job.results = malloc(many * (sizeof(double) + sizeof(int64_t)) + 1);
    if (!job.results)
        return -1;
    job.counts = (int64_t *)(job.results + many);
    run(F(fold_body), &job, in->outer * parts * job.cut.tiles, slices * in->reduced, in->threads);
    for (int64_t slice = 0; slice < slices && many; slice++) {
        int64_t first = slice / in->inner * parts * in->inner + slice % in->inner, number = 0;
        double result = START(op);
        for (int64_t part = 0; part < parts; part++) {
            result = F(either)(op, result, job.results[first + part * in->inner]);
            number += job.counts[first + part * in->inner];
        }
        job.empty += F(finish)(&job, op, slice, result, number);
    }
    free(job.results);
    return job.empty;
}

static int64_t F(logsumexp)(const Input *in, A *out)
{
    const int64_t slices = in->outer * in->inner;
    A *tops = malloc(2 * slices * sizeof(A) + 1), *totals = tops + slices;
    int64_t failed = tops ? F(fold)(in, LARGEST, NULL, -1, tops, NULL) : -1;
    for (int64_t i = 0; i < slices && failed >= 0; i++) /* inf - inf is no number */
        out[i] = tops[i] == -(A)INFINITY ? 0 : tops[i];
    failed = failed >= 0 ? F(fold)(in, EXPONENTIALS, out, -1, totals, NULL) : -1;
    for (int64_t i = 0; i < slices && failed >= 0; i++)
        out[i] = tops[i] - tops[i] == 0 ? (A)(tops[i] + log((double)totals[i])) : tops[i];
    free(tops);
    return failed;
}

/* --- places ------------------------------------------------------------------------------------------------------------ */

typedef struct {
    const Input *in;
    const A *own;
    int64_t *index, tiles;
} F(Find);

INLINE int F(kept)(const Input *in, int64_t offset, A e)
{
    return in->mask ? in->mask[offset] != 0 : in->value != in->value ? e == e : e != (A)in->value;
}

static void F(find_body)(void *argument, int64_t from, int64_t to)
{
    F(Find) *job = argument;
    const Input *in = job->in;
    const int64_t each = in->inner > 1 ? -1 : 0;
    A block[TILE] ALIGNED;
    for (int64_t unit = from; unit < to; unit++) {
        int64_t o = unit / job->tiles, column = unit % job->tiles * TILE, width = LEAST(in->inner - column, TILE);
        const A *own = job->own + o * in->inner + column;
        int64_t *index = job->index + o * in->inner + column, missing = width;
        for (int64_t c = 0; c < width; c++)
            index[c] = -1;
        for (int64_t row = 0; row < in->reduced && missing; row += each ? 1 : TILE) {
            int64_t n = each ? width : LEAST(in->reduced - row, TILE);
            int64_t offset = (o * in->reduced + row) * in->inner + column;
            const F(Any) *x = F(read)(in, offset, n, block);
            for (int64_t c = 0; c < n; c++) {
                A e = x[c], wanted = own[c & each];
                if ((e == wanted || (e != e && wanted != wanted)) && index[c & each] < 0 && F(kept)(in, offset + c, e)) {
                    index[c & each] = each ? row : row + c;
                    missing--;
                }
            }
        }
    }
}

static void F(find)(const Input *in, const A *own, int64_t *index)
{
    F(Find) job = {in, own, index, (in->inner + TILE - 1) / TILE};
    run(F(find_body), &job, in->outer * job.tiles, size_of(in), in->threads);
}

static void F(first)(const Input *in, A *out)
{
    for (int64_t slice = 0; slice < in->outer * in->inner; slice++) {
        int64_t offset = slice / in->inner * in->reduced * in->inner + slice % in->inner, row = 0;
        A number = 0;
        while (row < in->reduced && !in->mask[offset + row * in->inner])
            row++;
        out[slice] = row < in->reduced ? *F(read)(in, offset + row * in->inner, 1, &number) : 0;
    }
}

static void F(valid)(const Input *in, int64_t offset, int64_t n, uint8_t *out)
{
    A block[BLOCK] ALIGNED, value = (A)in->value;
    const F(Any) *x = F(read)(in, offset, n, block);
    if (value != value)
        for (int64_t i = 0; i < n; i++)
            out[i] = x[i] == x[i];
    else
        for (int64_t i = 0; i < n; i++)
            out[i] = x[i] != value;
    const uint8_t *mask = in->mask;
    for (int64_t i = 0; i < (mask ? n : 0); i++)
        out[i] &= mask[offset + i] != 0;
}

/* --- gradients ---------------------------------------------------------------------------------------------------------- */

typedef struct {
    const Input *in; /* with a mask */
    const A *own, *factor; /* (outer, inner) */
    A *out;
    Cut cut;
    int op;
} F(Map);

INLINE void F(map_units)(int op, F(Map) *job, int64_t from, int64_t to)
{
    const Input *in = job->in;
    const int64_t each = in->inner > 1 ? -1 : 0;
    A block[TILE] ALIGNED, own[TILE] ALIGNED = {0}, factor[TILE] ALIGNED = {0};
    for (int64_t unit = from; unit < to; unit++) {
        Piece p = piece_of(in, &job->cut, unit);
        for (int64_t c = 0; c < (each ? p.width : LANES); c++) {
            own[c] = job->own[p.slice + (c & each)];
            factor[c] = job->factor[p.slice + (c & each)];
        }
        for (int64_t row = 0; row < p.rows; row += each ? 1 : TILE) {
            int64_t n = each ? p.width : LEAST(p.rows - row, TILE), offset = p.offset + row * in->inner;
            const F(Any) *x = F(read)(in, offset, n, block);
            for (int64_t i = 0; i < n; i += LANES) {
                AV v = F(load)(x + i, n - i, 0), q = *(AV *)(own + (i & each)), f = *(AV *)(factor + (i & each));
                IV left = F(left_out)(BY_MASK, v, in->mask + offset + i, n - i, 0);
                v = SELECT(left, q, v);
                v = op == DISTANCES ? (v - q) * f
                    : op == SHARES  ? (AV)((IV)ALL(1) & (IV)(v == q)) * f + 0
                                    : F(exp)(v - q) * f;
                F(store)(job->out + offset + i, n - i, CLEARED(v, left));
            }
        }
    }
}

static void F(map_body)(void *argument, int64_t from, int64_t to)
{
    F(Map) *job = argument;
    job->op == DISTANCES ? F(map_units)(DISTANCES, job, from, to)
    : job->op == SHARES  ? F(map_units)(SHARES, job, from, to)
                         : F(map_units)(WEIGHTS, job, from, to);
}

static void F(map)(const Input *in, int op, const A *own, const A *factor, A *out)
{
    F(Map) job = {in, own, factor, out, cut_of(in), op};
    run(F(map_body), &job, in->outer * job.cut.parts * job.cut.tiles, size_of(in), in->threads);
}

/* --- softmax -------------------------------------------------------------------------------------------------------------- */

typedef struct {
    const Input *in; /* rows */
    A *out;
    const A *result, *gradient; /* of the forward pass, and what arrives */
    int32_t logarithm;
} F(Softmax);

INLINE void F(softmax_row)(int how, const F(Softmax) *job, int64_t row)
{
    const Input *in = job->in;
    const int logarithm = job->logarithm;
    const int64_t n = in->reduced, offset = row * n;
    const A top = (A)F(fold_row)(how, LARGEST, 0, in, offset, n, 0, NULL), none = -(A)INFINITY, value = (A)in->value;
    const A base = top == none ? 0 : top; /* inf - inf is no number */
    A block[BLOCK] ALIGNED, *out = job->out + offset;
    double total = 0;
    for (int64_t first = 0; first < n; first += BLOCK) {
        const int64_t size = LEAST(n - first, BLOCK);
        const F(Any) *x = F(read)(in, offset + first, size, block);
        const uint8_t *mask = how == BY_MASK ? in->mask + offset + first : (const uint8_t *)x;
        AV sum = {0};
        for (int64_t i = 0; i < size; i += LANES) {
            AV v = F(load)(x + i, size - i, value);
            AV distance = SELECT(F(left_out)(how, v, mask + i, size - i, value), ALL(none), v) - base, e = F(exp)(distance);
            F(store)(out + first + i, size - i, logarithm ? distance : e);
            sum += e;
        }
        total += F(across)(ELEMENTS, sum);
    }
    if (top == none) /* nothing, or nothing but -inf: zeros, or -inf, stand there already */
        return;
    const A divisor = (A)(logarithm ? log(total) : 1 / total);
    for (int64_t i = 0; i < n; i += LANES) {
        AV v = F(load)(out + i, n - i, 0);
        F(store)(out + i, n - i, logarithm ? v - divisor : v * divisor);
    }
    for (int64_t i = 0; i < n && (divisor - divisor != 0 || top - top != 0); i++) { /* NaN, but not where it is left out */
        A e = 0;
        if (!F(kept)(in, offset + i, *F(read)(in, offset + i, 1, &e)))
            out[i] = logarithm ? none : 0;
    }
}

static void F(softmax_body)(void *argument, int64_t from, int64_t to)
{
    F(Softmax) *job = argument;
    for (int64_t row = from; row < to; row++)
        job->in->mask ? F(softmax_row)(BY_MASK, job, row) : F(softmax_row)(BY_NAN, job, row);
}

static void F(softmax_backward_body)(void *argument, int64_t from, int64_t to)
{
    F(Softmax) *job = argument;
    const int64_t n = job->in->reduced;
    for (int64_t row = from; row < to; row++) {
        const A *y = job->result + row * n, *g = job->gradient + row * n;
        const int logarithm = job->logarithm;
        const uint8_t *mask = job->in->mask + row * n;
        A *out = job->out + row * n, all = 0;
        double total = 0;
        AV sum = {0};
        IV some = {0}; /* a row of nothing but -inf takes nothing in */
        for (int64_t i = 0; i < n; i += LANES) {
            AV made = F(load)(y + i, n - i, 0), arriving = F(load)(g + i, n - i, 0);
            IV left = F(left_out)(BY_MASK, made, mask + i, n - i, 0);
            arriving = CLEARED(arriving, left);
            sum += logarithm ? arriving : CLEARED(arriving * made, left);
            some |= ~left & (logarithm ? (IV)(made != -(A)INFINITY) : (IV)(made != 0));
            if (i % BLOCK == BLOCK - LANES || i + LANES >= n) {
                total += F(across)(ELEMENTS, sum);
                sum = ALL(0);
            }
        }
        for (int lane = 1; lane < LANES; lane++)
            some[0] |= some[lane];
        all = (A)total;
        for (int64_t i = 0; i < n; i += LANES) {
            AV made = F(load)(y + i, n - i, 0), arriving = F(load)(g + i, n - i, 0);
            IV left = F(left_out)(BY_MASK, made, mask + i, n - i, 0) | (some[0] ? 0 : -1);
            AV result = logarithm ? arriving - F(exp)(made) * all : made * (arriving - all);
            F(store)(out + i, n - i, CLEARED(result, left));
        }
    }
}

static void F(softmax)(const Input *in, int32_t logarithm, const A *result, const A *gradient, A *out)
{
    F(Softmax) job = {in, out, result, gradient, logarithm};
    run(gradient ? F(softmax_backward_body) : F(softmax_body), &job, in->outer, size_of(in), in->threads);
}

#undef LANES
#undef AV
#undef IV
#undef ALL
#undef SELECT
#undef CLEARED
#undef VECTORS
#undef IS_EXTREME
#undef START
#undef F
#undef A
#undef I
#undef IS_DOUBLE
#undef LARGER
#undef SMALLER
