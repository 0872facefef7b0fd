/* Reductions of decoded blocks; see kernels.c. A is what is computed with, W what the sums of blocks are added in. */

#define LANES (VECTOR / (int64_t)sizeof(A))
#define AV A_NAME(Av)
typedef A AV __attribute__((vector_size(VECTOR)));

/* --- sums --------------------------------------------------------------------------------------------------------- */

typedef struct {
    const Input *in;
    int64_t parts, tiles, length; /* a slice has several parts of `length` rows, a row several tiles of columns */
    W *totals;                    /* (outer, parts, inner) */
    int64_t *counts;
} A_NAME(Sums);

static void A_NAME(sum_body)(void *argument, int64_t from, int64_t to)
{
    A_NAME(Sums) *job = argument;
    const Input *in = job->in;
    if (in->inner == 1 && job->parts == 1) {
        NAME(adders)[in->dtype](in, 0, from * in->reduced, to - from, in->reduced, job->totals + from, job->counts + from);
        return;
    }
    for (int64_t unit = from; unit < to; unit++) {
        int64_t tile = unit % job->tiles, part = unit / job->tiles % job->parts, o = unit / job->tiles / job->parts;
        int64_t row = part * job->length, column = tile * TILE, n = LEAST(in->reduced - row, job->length);
        int64_t offset = (o * in->reduced + row) * in->inner + column;
        int64_t result = (o * job->parts + part) * in->inner + column, width = LEAST(in->inner - column, TILE);
        int columns = in->inner > 1;
        NAME(adders)[in->dtype](in, columns, offset, columns ? n : 1, columns ? width : n, job->totals + result,
                                job->counts + result);
    }
}

static int64_t A_NAME(sum)(const Input *in, int32_t mean, A *total, int64_t *count)
{
    int64_t slices = in->outer * in->inner, empty = 0;
    A_NAME(Sums) job = {.in = in};
    job.length = in->inner == 1 ? PART : PART / LEAST(in->inner, TILE);
    job.parts = in->reduced > job.length ? (in->reduced + job.length - 1) / job.length : 1;
    job.tiles = (in->inner + TILE - 1) / TILE;
    if (slices == 0)
        return 0;
    W only_total;
    int64_t only_count, results = slices * job.parts;
    job.totals = results == 1 ? &only_total : malloc(results * sizeof(W));
    job.counts = results == 1 ? &only_count : malloc(results * sizeof(int64_t));
    if (job.totals && job.counts) {
        run(A_NAME(sum_body), &job, in->outer * job.parts * job.tiles, slices * in->reduced, in->threads);
        for (int64_t o = 0; o < in->outer; o++)
            for (int64_t i = 0; i < in->inner; i++) {
                W sum = 0;
                int64_t number = 0, first = o * job.parts * in->inner + i, slice = o * in->inner + i;
                for (int64_t part = 0; part < job.parts; part++) {
                    sum += job.totals[first + part * in->inner];
                    number += job.counts[first + part * in->inner];
                }
                total[slice] = (A)(mean ? sum / (W)number : sum);
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

#undef LANES
#undef AV
#undef A_NAME
#undef A
#undef W
#undef I
