/* Reductions and gradients for one type A that is computed with, and I, the integer as wide; see kernels.c. Slices are the
   rows of a tensor with inner == 1, and columns otherwise. */

#define LANES (VECTOR / (int64_t)sizeof(A))
#define GROUP (128 / (int64_t)sizeof(A)) /* elements of a row that are read together, in as many vectors as they need */
#define HALF (GROUP / 2)
#define AV F(Numbers)
#define IV F(Bits)
#define TV F(Takes)
typedef A AV __attribute__((vector_size(VECTOR), aligned(1), may_alias));
typedef I IV __attribute__((vector_size(VECTOR), aligned(1), may_alias));
typedef A F(Quarter) __attribute__((vector_size(32), aligned(1), may_alias));
typedef I F(QuarterBits) __attribute__((vector_size(32), aligned(1), may_alias));
typedef A F(Any) ANYWHERE;
#define ALL(number) ((A)(number) - (AV){0}) /* a sum would lose the sign of -0.0 */
#define VECTORS(n) (((n) + LANES - 1) / LANES)
#define IS_LIMIT(op) ((op) == LARGEST || (op) == EXPONENTIALS) /* -inf stands for what is left out */
#define START(op) ((A)((op) == LARGEST ? -INFINITY : 0))         /* the result for nothing */

/* Which lanes take part: bits of a mask register, or lanes that are -1; and what is done with them. COUNT takes 1 from the
   lanes that take part. */
#if VECTOR == 64
typedef M TV;
#define SAME(v) MM(cmp, _mask)(v, v, _CMP_ORD_Q)
#define DIFFERS(v, w) MM(cmp, _mask)(v, w, _CMP_NEQ_UQ)
#define EQUAL(v, w) MM(cmp, _mask)(v, w, _CMP_EQ_OQ)
#define NOT_BELOW(v, w) MM(cmp, _mask)(v, w, _CMP_NLT_UQ)
#define SELECT(takes, a, b) ((AV)MM(mask_mov, )(b, takes, a))
#define CLEARED(a, takes) ((AV)MM(maskz_mov, )(takes, a))
#define ADDED(sum, a, takes) ((AV)MM(mask_add, )(sum, takes, sum, a))
#define COUNT(note, takes) ((IV)MI(mask_sub)((__m512i)(note), takes, (__m512i)(note), (__m512i)((IV){0} + 1)))
#define BETWEEN(at, low, high) ((TV)(((UINT64_MAX >> (64 - (high))) & (UINT64_MAX << (low))) >> (at)))
#define ANY(takes) ((takes) != 0)
#define MOST(a, b) ((AV)MM(max, )(a, b))
#else
typedef IV TV;
#define SAME(v) ((TV)((v) == (v)))
#define DIFFERS(v, w) ((TV)((v) != (w)))
#define EQUAL(v, w) ((TV)((v) == (w)))
#define NOT_BELOW(v, w) (~(TV)((v) < (w)))
#define SELECT(takes, a, b) ((AV)(((IV)(a) & (takes)) | ((IV)(b) & ~(takes))))
#define CLEARED(a, takes) ((AV)((IV)(a) & (takes)))
#define ADDED(sum, a, takes) ((sum) + CLEARED(a, takes))
#define COUNT(note, takes) ((note) + (takes))
#define BETWEEN(at, low, high) F(between)((low) - (at), (high) - (at))
#define ANY(takes) F(any)(takes)
#ifdef __AVX2__
#define MOST(a, b) ((AV)MAX256(a, b))
#else
#define MOST(a, b) SELECT((TV)((a) > (b)), a, b) /* b of two zeros, as MAX256 */
#endif

INLINE TV F(between)(int64_t low, int64_t high)
{
    IV lanes;
    for (int lane = 0; lane < LANES; lane++)
        lanes[lane] = lane;
    return (lanes >= (I)low) & (lanes < (I)high);
}

INLINE int F(any)(TV takes)
{
    I any = 0;
    for (int lane = 0; lane < LANES; lane++)
        any |= takes[lane];
    return any != 0;
}
#endif

/* The exponential of numbers that are not above 0, within two units in the last place; 0 where it would be subnormal. */
INLINE AV F(exp)(AV x)
{
#if IS_DOUBLE
    const AV shift = ALL(0x1.8p52);
    const double high = 0x1.62e42fefa3800p-1, low = 0x1.ef35793c76730p-45;
    const TV normal = NOT_BELOW(x, ALL(-708.0));
#else
    const AV shift = ALL(0x1.8p23f);
    const float high = 0x1.62e400p-1f, low = 0x1.7f7d1cp-20f;
    const TV normal = NOT_BELOW(x, ALL(-87.0f));
#endif
    x = CLEARED(x, normal);
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
    return CLEARED(p * (AV)scale, normal);
}

/* --- a vector of elements; the last of a row is filled up with left-out ones ------------------------------------------ */

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

/* Say which of LANES elements take part; `how` is known when this is compiled. */
INLINE TV F(takes)(int how, AV v, const uint8_t *mask, int64_t n, A value)
{
    if (how != BY_MASK)
        return how == BY_NAN ? SAME(v) : DIFFERS(v, ALL(value));
    if (n >= LANES)
        return F(set)(mask);
    uint8_t padded[LANES] = {0};
    memcpy(padded, mask, n);
    return F(set)(padded);
}

/* --- reductions ------------------------------------------------------------------------------------------------------ */

typedef struct {
    AV result;
    IV note; /* less 1 for each that is kept; of LARGEST for each NaN among them */
} F(State);

/* Two results as one; of NaN it is not said which. */
INLINE AV F(both)(int op, AV a, AV b)
{
    if (op == LARGEST)
        return MOST(a, b);
    return a + b;
}

/* Take LANES elements in; `own` is a number of their slice: the mean, the largest, for LARGEST the sign to change. */
INLINE F(State) F(step)(int op, F(State) s, AV v, TV takes, AV own)
{
    if (op == LARGEST) {
        v = SELECT(takes, (AV)((IV)v ^ (IV)own), ALL(-INFINITY));
        s.note = COUNT(s.note, DIFFERS(v, v));
        s.result = MOST(s.result, v);
        return s;
    }
    if (op == EXPONENTIALS)
        s.result += F(exp)(SELECT(takes, v, ALL(-INFINITY)) - own);
    else if (op == EQUALS)
        s.result = ADDED(s.result, ALL(1), takes & EQUAL(v, own));
    else {
        if (op != ELEMENTS)
            v = CLEARED(v, takes) - own;
        if (op == SQUARES)
            v = v * v;
        s.result = ADDED(s.result, v, takes);
    }
    s.note = COUNT(s.note, takes);
    return s;
}

INLINE double F(either)(int op, double a, double b)
{
    if (op == LARGEST)
        return b != b || b > a ? b : a;
    return a + b;
}

/* Reduce the vectors of a group to one number, in the same order whatever their width. */
INLINE double F(across)(int op, const F(State) *states)
{
    AV results[GROUP / LANES];
    for (int k = 0; k < GROUP / LANES; k++)
        results[k] = states[k].result;
    const F(Quarter) *q = (const F(Quarter) *)results;
    F(Quarter) all = (q[0] + q[1]) + (q[2] + q[3]);
    if (op == LARGEST)
        all = q[0];
    for (int k = 1; k < 4 && op == LARGEST; k++) {
        const F(QuarterBits) larger = q[k] > all;
        all = (F(Quarter))(((F(QuarterBits))q[k] & larger) | ((F(QuarterBits))all & ~larger));
    }
#if !IS_DOUBLE
    if (op != LARGEST) {
        const Doubles sums = __builtin_convertvector(*(Floats *)&all, Doubles) + __builtin_convertvector(*((Floats *)&all + 1), Doubles);
        return (sums[0] + sums[2]) + (sums[1] + sums[3]);
    }
#endif
    double result = all[0];
    for (int lane = 1; lane < 32 / (int)sizeof(A); lane++)
        result = F(either)(op, result, all[lane]);
    return result;
}

INLINE int64_t F(total)(const F(State) *states)
{
    IV notes = {0};
    int64_t total = 0;
    for (int k = 0; k < GROUP / LANES; k++)
        notes += states[k].note;
    for (int lane = 0; lane < LANES; lane++)
        total += notes[lane];
    return total;
}

/* Reduce a block of a row of at least one group. */
INLINE double F(fold_block)(int how, int op, const F(Any) *x, const uint8_t *mask, int64_t size, A value, A own, int64_t *kept)
{
    const AV owns = ALL(own);
    int64_t i = 0;
    F(State) states[GROUP / LANES];
    for (int k = 0; k < GROUP / LANES; k++)
        states[k] = (F(State)){ALL(START(op)), {0}};
#define STEP(k, but)                                                                                                    \
    {                                                                                                                   \
        AV v = *(const AV *)(x + (k) * LANES);                                                                          \
        states[k] = F(step)(op, states[k], v, F(takes)(how, v, mask + (k) * LANES, LANES, value) but, owns);            \
    }
#define STEPS(but)                                                                                                      \
    if (op == EXPONENTIALS)                                                                                             \
        for (int k = 0; k < GROUP / LANES; k++)                                                                         \
            STEP(k, but(k))                                                                                             \
    else                                                                                                                \
        _Pragma("GCC unroll 8") for (int k = 0; k < GROUP / LANES; k++) STEP(k, but(k))
#define ANY_OF(k)
#define NEW_OF(k) &BETWEEN((k) * LANES, low, GROUP)
    for (; i + GROUP <= size; i += GROUP, x += GROUP, mask += GROUP)
        STEPS(ANY_OF)
    if (i < size) { /* the last group, but those of it that are in */
        const int64_t low = GROUP - (size - i);
        x -= low, mask -= low;
        STEPS(NEW_OF)
    }
#undef STEP
#undef STEPS
#undef ANY_OF
#undef NEW_OF
    const int64_t note = F(total)(states);
    *kept -= note;
    return op == LARGEST && note ? NAN : F(across)(op, states);
}

/* One of two numbers, without a branch and without arithmetic. */
INLINE A F(pick)(int first, A a, A b)
{
    union {
        A number;
        I bits;
    } one = {a}, other = {b};
    one.bits = (one.bits & -(I)first) | (other.bits & ((I)first - 1));
    return one.number;
}

/* Reduce less than a group, one by one. */
INLINE double F(fold_few)(int how, int op, const F(Any) *x, const uint8_t *mask, int64_t size, A value, A own, int64_t *kept)
{
    double result = START(op);
    A few[GROUP];
    for (int64_t i = 0; i < size; i++) {
        const int keep = how == BY_MASK ? mask[i] != 0 : how == BY_NAN ? x[i] == x[i] : x[i] != value;
        A e = F(pick)(keep, x[i], IS_LIMIT(op) ? (A)-INFINITY : 0);
        *kept += keep;
        if (op == LARGEST)
            result = F(either)(op, result, keep && signbit(own) ? -e : e);
        else if (op == EXPONENTIALS)
            few[i] = e;
        else if (op == EQUALS)
            result += keep & (e == own);
        else {
            e = op == ELEMENTS ? e : F(pick)(keep, e - own, 0);
            result += op == SQUARES ? e * e : e;
        }
    }
    for (int64_t i = 0; op == EXPONENTIALS && i < size; i += LANES)
        F(store)(few + i, size - i, F(exp)(F(load)(few + i, size - i, -INFINITY) - own));
    for (int64_t i = 0; op == EXPONENTIALS && i < size; i++)
        result += few[i];
    return result;
}

INLINE double F(fold_row)(int how, int op, const Input *in, int64_t offset, int64_t n, A own, int64_t *kept)
{
    double result = START(op);
    A block[BLOCK] ALIGNED;
    *kept = 0;
    for (int64_t first = 0; first < n; first += BLOCK) {
        const int64_t size = LEAST(n - first, BLOCK);
        const F(Any) *x = F(read)(in, offset + first, size, block);
        const uint8_t *mask = how == BY_MASK ? in->mask + offset + first : (const uint8_t *)x;
        const A value = (A)in->value;
        result = F(either)(op, result, size < GROUP ? F(fold_few)(how, op, x, mask, size, value, own, kept)
                                                    : F(fold_block)(how, op, x, mask, size, value, own, kept));
    }
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
        s = F(step)(op, s, v, F(takes)(how, v, mask + (k) * inner + c, n, value), owns);                                \
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

INLINE void F(fold_columns)(int how, int op, const Input *in, int64_t offset, int64_t n, int64_t width, const A *own, A turn,
                            double *results, int64_t *counts)
{
    A lanes[TILE] ALIGNED, owns[TILE] ALIGNED, block[ROWS * TILE] ALIGNED;
    I notes[TILE] ALIGNED;
    for (int64_t c = 0; c < VECTORS(width) * LANES; c++)
        owns[c] = own && c < width ? own[c] : turn;
    for (int64_t c = 0; c < width; c++) {
        results[c] = START(op);
        counts[c] = 0;
    }
    for (int64_t row = 0; row < n;) {
        const int64_t end = LEAST(n, row + FLUSH);
        for (int64_t c = 0; c < VECTORS(width) * LANES; c++) {
            lanes[c] = START(op);
            notes[c] = 0;
        }
        for (; row < end; row += ROWS)
            F(take_rows)(how, op, LEAST(end - row, ROWS), in, offset + row * in->inner, width, owns, block, lanes, notes);
        row = end;
        for (int64_t c = 0; c < width; c++) {
            results[c] = F(either)(op, results[c], op == LARGEST && notes[c] ? NAN : lanes[c]);
            counts[c] -= notes[c];
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
    A turn; /* -0.0 for the smallest, which is the largest with its sign changed */
    int op;
} F(Fold);

/* Write the result of a slice; say whether nothing is kept. */
INLINE int F(finish)(const F(Fold) *job, int op, int64_t slice, double result, int64_t number)
{
    const double divisor = (double)number - job->correction;
    if (op == LARGEST)
        job->out[slice] = (A)(signbit(job->turn) ? -result : result);
    else
        job->out[slice] = (A)(job->correction < 0 ? result : result / (divisor > 0 ? divisor : 0));
    if (job->count)
        job->count[slice] = number;
    return op == LARGEST ? result == START(op) : number == 0;
}

INLINE void F(fold_units)(int how, int op, F(Fold) *job, int64_t from, int64_t to)
{
    const Input *in = job->in;
    double results[TILE];
    int64_t counts[TILE], empty = 0;
    for (int64_t unit = from; unit < to; unit++) {
        Piece p = piece_of(in, &job->cut, unit);
        const A *own = job->own ? job->own + p.slice : NULL;
        if (in->inner > 1)
            F(fold_columns)(how, op, in, p.offset, p.rows, p.width, own, job->turn, results, counts);
        else
            *results = F(fold_row)(how, op, in, p.offset, p.rows, own ? *own : job->turn, counts);
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
    X(BY_VALUE, ELEMENTS) X(BY_NAN, ELEMENTS) X(BY_NAN, LARGEST) X(BY_MASK, ELEMENTS) X(BY_MASK, LARGEST)               \
    X(BY_MASK, EXPONENTIALS) X(BY_MASK, EQUALS) X(BY_MASK, DIFFERENCES) X(BY_MASK, SQUARES)
#define DEFINE(how, op)                                                                                                 \
    static __attribute__((noinline)) void F(fold_##how##_##op)(F(Fold) *job, int64_t from, int64_t to)                  \
    {                                                                                                                   \
        F(fold_units)(how, op, job, from, to);                                                                          \
    }
#define CALL(by, reduction)                                                                                             \
    if (how == by && job->op == reduction)                                                                              \
        return F(fold_##by##_##reduction)(job, from, to);
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
    F(Fold) job = {.in = in, .own = own, .out = out, .count = count, .correction = correction, .cut = cut_of(in),
                   .turn = op == SMALLEST ? -(A)0 : 0, .op = op == SMALLEST ? LARGEST : op};
    const int64_t slices = in->outer * in->inner, parts = job.cut.parts, many = parts == 1 ? 0 : slices * parts;
    job.results = malloc(many * (sizeof(double) + sizeof(int64_t)) + 1);
    if (!job.results)
        return -1;
    job.counts = (int64_t *)(job.results + many);
    run(F(fold_body), &job, in->outer * parts * job.cut.tiles, slices * in->reduced, in->threads);
    for (int64_t slice = 0; slice < slices && many; slice++) {
        int64_t first = slice / in->inner * parts * in->inner + slice % in->inner, number = 0;
        double result = START(job.op);
        for (int64_t part = 0; part < parts; part++) {
            result = F(either)(job.op, result, job.results[first + part * in->inner]);
            number += job.counts[first + part * in->inner];
        }
        job.empty += F(finish)(&job, job.op, slice, result, number);
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

/* Find, in a row or a part of it, the first element that is kept and equals `wanted`; n if there is none. */
INLINE int64_t F(find_first)(int how, const Input *in, int64_t offset, const F(Any) *x, int64_t n, A wanted)
{
    const uint8_t *mask = how == BY_MASK ? in->mask + offset : (const uint8_t *)x;
    const A value = (A)in->value;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const AV v = *(const AV *)(x + i);
        const TV same = wanted == wanted ? EQUAL(v, ALL(wanted)) : DIFFERS(v, v);
        if (ANY(same & F(takes)(how, v, mask + i, LANES, value)))
            break;
    }
    while (i < n && !((x[i] == wanted || (x[i] != x[i] && wanted != wanted)) && F(kept)(in, offset + i, x[i])))
        i++;
    return i;
}

static void F(find_body)(void *argument, int64_t from, int64_t to)
{
    F(Find) *job = argument;
    const Input *in = job->in;
    A block[TILE] ALIGNED;
    for (int64_t unit = from; unit < to; unit++) {
        int64_t o = unit / job->tiles, column = unit % job->tiles * TILE, width = LEAST(in->inner - column, TILE);
        const A *own = job->own + o * in->inner + column;
        int64_t *index = job->index + o * in->inner + column, missing = width;
        for (int64_t c = 0; c < width; c++)
            index[c] = -1;
        for (int64_t row = 0; in->inner == 1 && row < in->reduced && *index < 0; row += TILE) {
            const int64_t n = LEAST(in->reduced - row, TILE), offset = o * in->reduced + row;
            const F(Any) *x = F(read)(in, offset, n, block);
            const int64_t at = in->mask                     ? F(find_first)(BY_MASK, in, offset, x, n, *own)
                               : in->value == in->value ? F(find_first)(BY_VALUE, in, offset, x, n, *own)
                                                        : F(find_first)(BY_NAN, in, offset, x, n, *own);
            *index = at < n ? row + at : -1;
        }
        for (int64_t row = 0; in->inner > 1 && row < in->reduced && missing; row++) {
            int64_t offset = (o * in->reduced + row) * in->inner + column;
            const F(Any) *x = F(read)(in, offset, width, block);
            for (int64_t c = 0; c < width; c++) {
                A e = x[c], wanted = own[c];
                if ((e == wanted || (e != e && wanted != wanted)) && index[c] < 0 && F(kept)(in, offset + c, e)) {
                    index[c] = row;
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
                const TV takes = F(takes)(BY_MASK, v, in->mask + offset + i, n - i, 0);
                v = SELECT(takes, v, q);
                v = op == DISTANCES ? (v - q) * f
                    : op == SHARES  ? CLEARED(ALL(1), EQUAL(v, q)) * f + 0
                                    : F(exp)(v - q) * f;
                F(store)(job->out + offset + i, n - i, CLEARED(v, takes));
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
    int64_t kept;
    const A top = (A)F(fold_row)(how, LARGEST, in, offset, n, 0, &kept), none = -(A)INFINITY, value = (A)in->value;
    const A base = top == none ? 0 : top; /* inf - inf is no number */
    A block[BLOCK] ALIGNED, *out = job->out + offset;
    double total = 0;
    for (int64_t first = 0; first < n; first += BLOCK) {
        const int64_t size = LEAST(n - first, BLOCK);
        const F(Any) *x = F(read)(in, offset + first, size, block);
        const uint8_t *mask = how == BY_MASK ? in->mask + offset + first : (const uint8_t *)x;
        F(State) states[GROUP / LANES] = {{{0}, {0}}};
        for (int64_t i = 0; i < size; i += LANES) {
            AV v = F(load)(x + i, size - i, value), *sum = &states[i / LANES % (HALF / LANES)].result;
            AV distance = SELECT(F(takes)(how, v, mask + i, size - i, value), v, ALL(none)) - base, e = F(exp)(distance);
            F(store)(out + first + i, size - i, logarithm ? distance : e);
            *sum += e;
        }
        total += F(across)(ELEMENTS, states);
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
        TV some = (TV){0}; /* a row of nothing but -inf takes nothing in */
        for (int64_t first = 0; first < n; first += BLOCK) {
            F(State) states[GROUP / LANES] = {{{0}, {0}}};
            for (int64_t i = first; i < LEAST(n, first + BLOCK); i += LANES) {
                AV made = F(load)(y + i, n - i, 0), arriving = F(load)(g + i, n - i, 0);
                AV *sum = &states[i / LANES % (HALF / LANES)].result;
                const TV takes = F(takes)(BY_MASK, made, mask + i, n - i, 0);
                arriving = CLEARED(arriving, takes);
                *sum += logarithm ? arriving : CLEARED(arriving * made, takes);
                some |= takes & DIFFERS(made, ALL(logarithm ? -INFINITY : 0));
            }
            total += F(across)(ELEMENTS, states);
        }
        const int any = ANY(some);
        all = (A)total;
        for (int64_t i = 0; i < n; i += LANES) {
            AV made = F(load)(y + i, n - i, 0), arriving = F(load)(g + i, n - i, 0);
            const TV takes = F(takes)(BY_MASK, made, mask + i, n - i, 0);
            AV result = logarithm ? arriving - F(exp)(made) * all : made * (arriving - all);
            F(store)(out + i, n - i, any ? CLEARED(result, takes) : (AV){0});
        }
    }
}

static void F(softmax)(const Input *in, int32_t logarithm, const A *result, const A *gradient, A *out)
{
    F(Softmax) job = {in, out, result, gradient, logarithm};
    run(gradient ? F(softmax_backward_body) : F(softmax_body), &job, in->outer, size_of(in), in->threads);
}

#undef LANES
#undef GROUP
#undef HALF
#undef AV
#undef IV
#undef TV
#undef ALL
#undef VECTORS
#undef IS_LIMIT
#undef START
#undef SAME
#undef DIFFERS
#undef EQUAL
#undef NOT_BELOW
#undef SELECT
#undef CLEARED
#undef ADDED
#undef COUNT
#undef BETWEEN
#undef ANY
#undef MOST
#undef F
#undef A
#undef I
#undef IS_DOUBLE
#undef MM
#undef MI
#undef M
#undef MAX256
