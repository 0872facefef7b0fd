/* Votes: the most frequent of a few codes U for each of VOTES slices; see mode.h. codes[r * VOTES + s] is element r of slice
   s, 0 where it is left out. */

static void U_NAME(vote)(const void *codes, int64_t n, int64_t many, int64_t *index, int64_t *count)
{
    typedef U V __attribute__((vector_size(VECTOR)));
    enum { LANES = VECTOR / sizeof(U) };
    for (int64_t s = 0; s < many; s += LANES) {
        V top = {0}, best = {0}, place = {0};
        for (int64_t r = 0; r < n; r++) {
            V v = *(const V *)((const U *)codes + r * VOTES + s), times = (V){0} + 1;
            /* Each counts itself and its equals before it, so that the last of them has the full count. */
            for (int64_t before = 0; before < r; before++)
                times -= (V)(*(const V *)((const U *)codes + before * VOTES + s) == v);
            V wins = (V)(v != 0) & ((V)(times > top) | ((V)(times == top) & (V)(v <= best)));
            top = (times & wins) | (top & ~wins);
            best = (v & wins) | (best & ~wins);
            place = (((V){0} + (U)r) & wins) | (place & ~wins);
        }
        for (int64_t lane = 0; lane < LEAST(LANES, many - s); lane++) {
            count[s + lane] = (int64_t)top[lane];
            index[s + lane] = top[lane] ? (int64_t)place[lane] : -1;
        }
    }
}

#undef U
#undef U_NAME
