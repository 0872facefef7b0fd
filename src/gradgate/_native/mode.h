/* Elements of one dtype T as unsigned integers in the order of the values; see kernels.c. CODE has one for 0.0 and -0.0, and
   one above all others for every NaN. */

PLAIN_LOOPS static void T_NAME(codes)(const Input *in, int64_t offset, int64_t stride, int64_t n, uint64_t *out)
{
    const T *x = (const T *)in->x + offset;
    if (stride == 1)
        for (int64_t i = 0; i < n; i++)
            out[i] = CODE(x[i]);
    else
        for (int64_t i = 0; i < n; i++)
            out[i] = CODE(x[i * stride]);
}

#undef T_NAME
