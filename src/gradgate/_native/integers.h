/* One dtype of integers, T; see kernels.c. */

INLINE void JOIN(add, T)(int how, const Whole *job, int64_t from, int64_t to)
{
    const Input *in = job->in;
    const T value = (T)in->whole;
    for (int64_t unit = from; unit < to; unit++) {
        Piece p = piece_of(in, &job->cut, unit);
        const T *x = (const T *)in->x + p.offset;
        const uint8_t *mask = how == BY_MASK ? in->mask + p.offset : (const uint8_t *)x;
        uint64_t totals[TILE];
        int64_t counts[TILE];
        memset(totals, 0, p.width * sizeof *totals);
        memset(counts, 0, p.width * sizeof *counts);
        if (in->inner == 1)
            for (int64_t first = 0; first < p.rows; first += 1 << 14) {
                N total = 0;
                uint32_t count = 0;
                for (int64_t i = first; i < LEAST(p.rows, first + (1 << 14)); i++) {
                    uint32_t take = how == BY_MASK ? mask[i] != 0 : x[i] != value;
                    total += (N)x[i] & -(N)take; /* read in any case, which vectors need */
                    count += take;
                }
                *totals += sizeof(N) == 4 ? (uint64_t)(int32_t)total : total;
                *counts += count;
            }
        else
            for (int64_t row = 0; row < p.rows; row++, x += in->inner, mask += in->inner)
                for (int64_t i = 0; i < p.width; i++) {
                    uint64_t take = how == BY_MASK ? mask[i] != 0 : x[i] != value;
                    totals[i] += (uint64_t)x[i] & -take;
                    counts[i] += take;
                }
        for (int64_t i = 0; i < p.width; i++) { /* several threads may have a part of one slice */
            __atomic_fetch_add(job->totals + p.slice + i, totals[i], __ATOMIC_RELAXED);
            __atomic_fetch_add(job->counts + p.slice + i, counts[i], __ATOMIC_RELAXED);
        }
    }
}

/* The largest of what is kept; of the bits turned around that is the smallest, turned around. */
INLINE void JOIN(most, T)(int how, const Whole *job, int64_t from, int64_t to)
{
    const Input *in = job->in;
    const T value = (T)in->whole, turn = (T)(job->op == LARGEST ? 0 : -1), least = (T)job->least;
    for (int64_t unit = from; unit < to; unit++) {
        Piece p = piece_of(in, &job->cut, unit);
        const T *x = (const T *)in->x + p.offset;
        const uint8_t *mask = how == BY_MASK ? in->mask + p.offset : (const uint8_t *)x;
        T found[TILE];
        for (int64_t i = 0; i < p.width; i++)
            found[i] = least;
        if (in->inner == 1) {
            T top = least;
            for (int64_t i = 0; i < p.rows; i++) {
                const T takes = (T) - (T)(how == BY_MASK ? mask[i] != 0 : x[i] != value);
                const T e = (T)((T)((x[i] ^ turn) & takes) | (T)(least & ~takes));
                top = e > top ? e : top;
            }
            *found = top;
        } else
            for (int64_t row = 0; row < p.rows; row++, x += in->inner, mask += in->inner)
                for (int64_t i = 0; i < p.width; i++) {
                    const T takes = (T) - (T)(how == BY_MASK ? mask[i] != 0 : x[i] != value);
                    const T e = (T)((T)((x[i] ^ turn) & takes) | (T)(least & ~takes));
                    found[i] = e > found[i] ? e : found[i];
                }
        for (int64_t i = 0; i < p.width; i++) { /* several threads may have a part of one slice */
            int64_t *out = (int64_t *)job->totals + p.slice + i, before = __atomic_load_n(out, __ATOMIC_RELAXED);
            while (found[i] > before && !__atomic_compare_exchange_n(out, &before, found[i], 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
                ;
        }
    }
}

static void JOIN(sum, T)(void *job, int64_t from, int64_t to)
{
    const Whole *of = job;
    if (of->op != ELEMENTS)
        of->in->mask ? JOIN(most, T)(BY_MASK, of, from, to) : JOIN(most, T)(BY_VALUE, of, from, to);
    else
        of->in->mask ? JOIN(add, T)(BY_MASK, of, from, to) : JOIN(add, T)(BY_VALUE, of, from, to);
}

static void JOIN(valid, T)(const Input *in, int64_t offset, int64_t n, uint8_t *out)
{
    const T *x = (const T *)in->x + offset, value = (T)in->whole;
    for (int64_t i = 0; i < n; i++)
        out[i] = x[i] != value;
    const uint8_t *mask = in->mask;
    for (int64_t i = 0; i < (mask ? n : 0); i++)
        out[i] &= mask[offset + i] != 0;
}

#undef T
#undef N
