/* One dtype of integers, T; see kernels.c. They are added as uint64_t, which wraps around as torch's sums do. */

PLAIN_LOOPS static void T_NAME(sum)(const Input *in, int op, int counted, const void *shift, int64_t offset,
                                    int64_t rows, int64_t n, void *out, int64_t *counts)
{
    (void)op, (void)counted, (void)shift;
    const T *x = (const T *)in->x + offset;
    const uint8_t *mask = in->mask + offset;
    uint64_t *totals = out;
    if (in->inner == 1)
        for (int64_t row = 0; row < rows; row++, x += n, mask += n) {
            uint64_t total = 0;
            int64_t count = 0;
            for (int64_t i = 0; i < n; i++) {
                total += mask[i] ? (uint64_t)x[i] : 0;
                count += mask[i] != 0;
            }
            totals[row] = total;
            counts[row] = count;
        }
    else {
        memset(totals, 0, n * sizeof *totals);
        memset(counts, 0, n * sizeof *counts);
        for (int64_t row = 0; row < rows; row++, x += in->inner, mask += in->inner)
            for (int64_t i = 0; i < n; i++) {
                totals[i] += mask[i] ? (uint64_t)x[i] : 0;
                counts[i] += mask[i] != 0;
            }
    }
}

PLAIN_LOOPS static void T_NAME(valid)(const Input *in, int64_t offset, int64_t n, uint8_t *out)
{
    const T *x = (const T *)in->x + offset, value = (T)in->whole;
    if (in->mask)
        for (int64_t i = 0; i < n; i++)
            out[i] = (in->mask[offset + i] != 0) & (x[i] != value);
    else
        for (int64_t i = 0; i < n; i++)
            out[i] = x[i] != value;
}

#undef T
#undef T_NAME
