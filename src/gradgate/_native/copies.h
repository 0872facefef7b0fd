/* Copies of elements of one size, as the unsigned integer E; see kernels.c. */

typedef E E_NAME(Any) __attribute__((aligned(1), may_alias)); /* 16 bytes need not lie at a multiple of 16 */

/* out[i] = mask[i] ? x[i] : value. */
PLAIN_LOOPS static void E_NAME(fill)(const void *source, const uint8_t *mask, const void *value, int64_t n, void *target)
{
    const E_NAME(Any) *x = source;
    E_NAME(Any) *out = target;
    const E other = *(const E_NAME(Any) *)value;
    for (int64_t i = 0; i < n; i++) {
        E keep = (E)-(E)(mask[i] != 0), e = x[i];
        out[i] = (e & keep) | (other & ~keep);
    }
}

/* out[i] = mask[i] ? value : 0. */
PLAIN_LOOPS static void E_NAME(spread)(const uint8_t *mask, const void *value, int64_t n, void *target)
{
    const E e = *(const E_NAME(Any) *)value;
    E_NAME(Any) *out = target;
    for (int64_t i = 0; i < n; i++)
        out[i] = e & (E)-(E)(mask[i] != 0);
}

#undef E
#undef E_NAME
