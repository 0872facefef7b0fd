/* Sums and means, for one type A that is computed with, and W that the sums of blocks are added in; see kernels.c. */

typedef struct {
    const Input *in;
    Cut cut;
    W *totals; /* (outer, parts, inner) */
    int64_t *counts;
    const A *shift; /* (outer, inner), or NULL */
    int op, counted;
} A_NAME(Sums);

static void A_NAME(sum_body)(void *argument, int64_t from, int64_t to)
{
    A_NAME(Sums) *job = argument;
    const Input *in = job->in;
    const NAME(Sum) add = NAME(adders)[in->dtype];
    if (in->inner == 1 && job->cut.parts == 1) {
        add(in, job->op, job->counted, AT(job->shift, from), from * in->reduced, to - from, in->reduced, job->totals + from,
            job->counts + from);
        return;
    }
    for (int64_t unit = from; unit < to; unit++) {
        Piece p = piece_of(in, &job->cut, unit);
        int columns = in->inner > 1;
        add(in, job->op, job->counted, AT(job->shift, p.slice), p.offset, columns ? p.rows : 1, columns ? p.width : p.rows,
            job->totals + p.result, job->counts + p.result);
    }
}

static int64_t A_NAME(sum)(const Input *in, int op, const A *shift, double correction, A *total, int64_t *count)
{
    A_NAME(Sums) job = {.in = in, .cut = cut_of(in), .shift = shift, .op = op};
    job.counted = count != NULL || correction >= 0;
    W only_total;
    int64_t slices = in->outer * in->inner, parts = job.cut.parts, results = slices * parts, empty = 0, only_count;
    if (slices == 0)
        return 0;
    job.totals = results == 1 ? &only_total : malloc(results * sizeof(W));
    job.counts = results == 1 ? &only_count : malloc(results * sizeof(int64_t));
    if (job.totals && job.counts) {
        run(A_NAME(sum_body), &job, in->outer * parts * job.cut.tiles, slices * in->reduced, in->threads);
        for (int64_t o = 0; o < in->outer; o++)
            for (int64_t i = 0; i < in->inner; i++) {
                W sum = 0;
                int64_t number = !job.counted, first = o * parts * in->inner + i, slice = o * in->inner + i;
                for (int64_t part = 0; part < parts; part++) {
                    sum += job.totals[first + part * in->inner];
                    if (job.counted)
                        number += job.counts[first + part * in->inner];
                }
                double divisor = (double)number - correction;
                total[slice] = (A)(correction < 0 ? sum : sum / (W)(divisor > 0 ? divisor : 0));
                if (count)
                    count[slice] = number;
                empty += number == 0;
            }
    } else
        empty = -1;
    if (results != 1) {
        free(job.totals);
        free(job.counts);
    }
    return empty;
}
