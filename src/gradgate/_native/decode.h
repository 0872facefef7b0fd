/* Reading one floating dtype; see kernels.c. T is what lies in memory, A what it is decoded to, READ makes a vector of A of a vector
   of T. */

#define LANES (VECTOR / (int64_t)sizeof(A))
#define TV T_NAME(tv)
#define AV T_NAME(av)
#define IV T_NAME(iv)

typedef T TV __attribute__((vector_size(VECTOR / sizeof(A) * sizeof(T)), aligned(1), may_alias));
typedef A AV __attribute__((vector_size(VECTOR), aligned(1), may_alias));
typedef I IV __attribute__((vector_size(VECTOR), aligned(1), may_alias));

INLINE AV T_NAME(read)(const T *x)
{
    TV v = *(const TV *)x;
    return READ(v);
}

INLINE A T_NAME(read_one)(const T *x)
{
    T several[VECTOR / sizeof(A)] = {*x};
    return T_NAME(read)(several)[0];
}

/* Write n elements from an offset on as numbers to compute with, and what `fill` holds where they are left out. `fill` has
   an element for each of them if `each` is -1, and LANES equal ones if it is 0. */
static void T_NAME(decode)(const Input *in, int64_t offset, int64_t n, const void *fills, int64_t each, void *out)
{
    const T *x = (const T *)in->x + offset;
    const uint8_t *mask = AT(in->mask, offset);
    const A *fill = fills;
    A *clean = out, value = (A)in->value;
    int64_t i = 0;
    if (mask)
        for (; i + LANES <= n; i += LANES) {
            IV left = (IV)LEFT(mask + i);
            *(IV *)(clean + i) = ((IV)T_NAME(read)(x + i) & ~left) | (*(const IV *)(fill + (i & each)) & left);
        }
    else
        for (; i + LANES <= n; i += LANES) {
            AV v = T_NAME(read)(x + i);
            IV take = OTHER_THAN(v, value);
            *(IV *)(clean + i) = ((IV)v & take) | (*(const IV *)(fill + (i & each)) & ~take);
        }
    for (; i < n; i++) {
        A e = T_NAME(read_one)(x + i);
        clean[i] = (mask ? mask[i] != 0 : OTHER_THAN(e, value)) ? e : fill[i & each];
    }
}

/* --- sums: the same as `decode` and an addition, without the block between them ------------------------------------- */

/* Say, as 0 and -1, what is left out of LANES elements; `how` is known when this is compiled. */
INLINE IV T_NAME(left)(int how, AV v, const uint8_t *mask, A value)
{
    return how == BY_MASK ? (IV)LEFT(mask) : how == BY_NAN ? ~(IV)(v == v) : (IV)(v == value);
}

INLINE int T_NAME(left_one)(int how, A e, const uint8_t *mask, A value)
{
    return how == BY_MASK ? *mask == 0 : how == BY_NAN ? !(e == e) : e == value;
}

/* What is added up for an element: the element, its difference to a shift, or the square of that. */
INLINE AV T_NAME(addend)(int op, AV v, AV shift)
{
    AV distance = v - shift;
    return op == ELEMENTS ? v : op == DIFFERENCES ? distance : (AV)(distance * distance);
}

INLINE A T_NAME(addend_one)(int op, A e, A shift)
{
    A distance = e - shift;
    return op == ELEMENTS ? e : op == DIFFERENCES ? distance : distance * distance;
}

/* Add up n neighbours, and give how many are left out. */
INLINE int64_t T_NAME(sum_piece)(int how, int op, int counted, const T *x, const uint8_t *mask, A value, A shift, int64_t n,
                                 W *total)
{
    AV a = {0}, b = {0}, c = {0}, d = {0}, shifts = (AV){0} + shift;
    IV number = {0};
    int64_t i = 0, lost = 0;
#define ADD(sum, at)                                                                                                    \
    {                                                                                                                   \
        AV v = T_NAME(read)(x + (at));                                                                                  \
        IV left = T_NAME(left)(how, v, mask + (at), value);                                                             \
        v = (AV)((IV)v & ~left);                                                                                        \
        sum += op == ELEMENTS ? v : (AV)((IV)T_NAME(addend)(op, v, shifts) & ~left);                                    \
        if (counted)                                                                                                    \
            number += left;                                                                                             \
    }
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        ADD(a, i)
        ADD(b, i + LANES)
        ADD(c, i + 2 * LANES)
        ADD(d, i + 3 * LANES)
    }
    for (; i + LANES <= n; i += LANES)
        ADD(a, i)
#undef ADD
    a = (a + b) + (c + d);
    for (int64_t lane = 0; lane < LANES; lane++) {
        *total += (W)a[lane];
        lost -= number[lane];
    }
    for (; i < n; i++) {
        A e = T_NAME(read_one)(x + i);
        int left = T_NAME(left_one)(how, e, mask + i, value);
        *total += left ? 0 : (W)T_NAME(addend_one)(op, e, shift);
        lost += left;
    }
    return lost;
}

/* Add up `rows` rows of n neighbours each, one after the other. */
INLINE void T_NAME(sum_rows)(int how, int op, int counted, const Input *in, const A *shift, int64_t offset, int64_t rows, int64_t n,
                             W *totals, int64_t *counts)
{
    const T *x = (const T *)in->x + offset;
    const uint8_t *mask = how == BY_MASK ? in->mask + offset : (const uint8_t *)x;
    for (int64_t row = 0; row < rows; row++, x += n, mask += n) {
        W total = 0;
        int64_t count = n;
        for (int64_t i = 0; i < n; i += SUMMED)
            count -= T_NAME(sum_piece)(how, op, counted, x + i, mask + i, (A)in->value, op == ELEMENTS ? 0 : shift[row],
                                       LEAST(n - i, SUMMED), &total);
        totals[row] = total;
        if (counted)
            counts[row] = count;
    }
}

/* Add up n rows of `width` columns, column by column. */
INLINE void T_NAME(sum_columns)(int how, int op, const Input *in, const A *shift, int64_t offset, int64_t n,
                                int64_t width, W *totals, int64_t *counts)
{
    const int64_t stride = in->inner;
    const T *x = (const T *)in->x + offset;
    const uint8_t *mask = how == BY_MASK ? in->mask + offset : (const uint8_t *)x;
    A sums[TILE] ALIGNED, value = (A)in->value;
    I numbers[TILE] ALIGNED;
    for (int64_t c = 0; c < width; c++) {
        totals[c] = 0;
        counts[c] = n;
    }
    for (int64_t row = 0; row < n;) {
        int64_t end = LEAST(n, row + 64);
        memset(sums, 0, width * sizeof(A));
        memset(numbers, 0, width * sizeof(I));
        while (row < end) {
            int64_t rows = end - row >= 4 ? 4 : 1, c = 0;
#define SELECT(k)                                                                                                       \
    AV v##k = T_NAME(read)(x + (k) * stride + c);                                                                       \
    IV left##k = T_NAME(left)(how, v##k, mask + (k) * stride + c, value);                                               \
    v##k = (AV)((IV)v##k & ~left##k);                                                                                   \
    if (op != ELEMENTS)                                                                                                 \
        v##k = (AV)((IV)T_NAME(addend)(op, v##k, *(const AV *)(shift + c)) & ~left##k);
            if (rows == 4)
                for (; c + LANES <= width; c += LANES) {
                    SELECT(0) SELECT(1) SELECT(2) SELECT(3)
                    *(AV *)(sums + c) += (v0 + v1) + (v2 + v3);
                    *(IV *)(numbers + c) += (left0 + left1) + (left2 + left3);
                }
            else
                for (; c + LANES <= width; c += LANES) {
                    SELECT(0)
                    *(AV *)(sums + c) += v0;
                    *(IV *)(numbers + c) += left0;
                }
#undef SELECT
            for (int64_t k = 0; k < rows; k++)
                for (int64_t j = c; j < width; j++) {
                    A e = T_NAME(read_one)(x + k * stride + j);
                    int left = T_NAME(left_one)(how, e, mask + k * stride + j, value);
                    sums[j] += left ? 0 : T_NAME(addend_one)(op, e, op == ELEMENTS ? 0 : shift[j]);
                    numbers[j] -= left;
                }
            row += rows;
            x += rows * stride;
            mask += rows * stride;
        }
        for (int64_t c = 0; c < width; c++) {
            totals[c] += (W)sums[c];
            counts[c] += numbers[c];
        }
    }
}

static void T_NAME(sum)(const Input *in, int op, int counted, const void *shift, int64_t offset, int64_t rows, int64_t n,
                        void *totals, int64_t *counts)
{
#define SUM(how, op, counted)                                                                                           \
    if (in->inner > 1)                                                                                                  \
        T_NAME(sum_columns)(how, op, in, shift, offset, rows, n, totals, counts);                                       \
    else                                                                                                                \
        T_NAME(sum_rows)(how, op, counted, in, shift, offset, rows, n, totals, counts);
#ifdef DIRECT
    A value = (A)in->value;
    if (!in->mask && value != value && !counted)
        SUM(BY_NAN, ELEMENTS, 0)
    else if (!in->mask && value != value)
        SUM(BY_NAN, ELEMENTS, 1)
    else if (!in->mask)
        SUM(BY_VALUE, ELEMENTS, 1)
    else
#endif
        if (op == ELEMENTS && !counted)
        SUM(BY_MASK, ELEMENTS, 0)
    else if (op == ELEMENTS)
        SUM(BY_MASK, ELEMENTS, 1)
    else if (op == DIFFERENCES)
        SUM(BY_MASK, DIFFERENCES, 1)
    else
        SUM(BY_MASK, SQUARES, 1)
#undef SUM
}

/* --- extremes: likewise --------------------------------------------------------------------------------------------- */

/* The largest, or the smallest, of n neighbours; NaN if one of them is. */
INLINE A T_NAME(extreme_row)(int how, int largest, const T *x, const uint8_t *mask, A value, int64_t n)
{
    const A limit = largest ? -(A)INFINITY : (A)INFINITY;
    AV a = (AV){0} + limit, b = a, none = a;
    IV nan = {0};
    int64_t i = 0;
#define TAKE(best, at)                                                                                                  \
    {                                                                                                                   \
        AV v = T_NAME(read)(x + (at));                                                                                  \
        IV left = T_NAME(left)(how, v, mask + (at), value);                                                             \
        v = (AV)(((IV)v & ~left) | ((IV)none & left));                                                                  \
        nan |= (IV)(v != v);                                                                                            \
        best = largest ? GREATER(v, best) : LESSER(v, best);                                                            \
    }
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        TAKE(a, i)
        TAKE(b, i + LANES)
    }
    for (; i + LANES <= n; i += LANES)
        TAKE(a, i)
#undef TAKE
    A best = limit;
    for (int64_t lane = 0; lane < LANES; lane++) {
        A of_both = largest ? (a[lane] > b[lane] ? a[lane] : b[lane]) : a[lane] < b[lane] ? a[lane] : b[lane];
        best = nan[lane] ? (A)NAN : (largest ? of_both > best : of_both < best) ? of_both : best;
    }
    for (; i < n; i++) {
        A e = T_NAME(read_one)(x + i);
        if (!T_NAME(left_one)(how, e, mask + i, value))
            best = e != e || (largest ? e > best : e < best) ? e : best;
    }
    return best;
}

static double T_NAME(extreme)(const Input *in, int largest, int64_t offset, int64_t n)
{
    const T *x = (const T *)in->x + offset;
    const uint8_t *mask = in->mask ? in->mask + offset : (const uint8_t *)x;
    A value = (A)in->value;
#define EXTREME(how)                                                                                                    \
    return largest ? T_NAME(extreme_row)(how, 1, x, mask, value, n) : T_NAME(extreme_row)(how, 0, x, mask, value, n);
    if (in->mask)
        EXTREME(BY_MASK)
    if (value != value)
        EXTREME(BY_NAN)
    EXTREME(BY_VALUE)
#undef EXTREME
}

/* Write 1 and 0 for n elements from an offset on: whether they are kept, by the excluded value and the mask if any. */
static void T_NAME(valid)(const Input *in, int64_t offset, int64_t n, uint8_t *out)
{
    const T *x = (const T *)in->x + offset;
    const uint8_t *mask = in->mask ? in->mask + offset : NULL;
    A value = (A)in->value;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        AV v = T_NAME(read)(x + i);
        IV take = OTHER_THAN(v, value);
        if (mask)
            take &= ~(IV)LEFT(mask + i);
        STORE_KEPT(out + i, take);
    }
    for (; i < n; i++) {
        A e = T_NAME(read_one)(x + i);
        out[i] = (!mask || mask[i]) && OTHER_THAN(e, value);
    }
}

#undef LANES
#undef TV
#undef AV
#undef IV
#undef T
#undef READ
#undef T_NAME
