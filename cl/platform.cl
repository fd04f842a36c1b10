/* platform.cl: helpers shared by all cache kernels. KVL_VECTORS is 1 where 16 floats fit a register or a few (the device's native vector width is above 1): bodies then work on
 * float16; elsewhere vectors are made of work-items, and scalar twins run. The same text compiles as C11 for sanitizer tests
 * (tests/codec/device_as_c.h supplies the OpenCL words). Scalar code here is IEEE: contraction off, fma() written out where wanted. */
#ifdef __OPENCL_VERSION__
#pragma OPENCL FP_CONTRACT OFF
#define KVL_GLOBAL global
#define KVL_LOCAL local
#define KVL_UNROLL _Pragma("unroll") /* arrays of vectors stay in registers only if the loops over them are unrolled */
#endif

/* Largest finite binary16: what non-finite and larger inputs are clamped to before they are stored in 16 bits. */
#define KVL_HALF_MAX 65504.0f

float kvl_clamp_half(float x) { return isnan(x) ? 0.0f : fmin(fmax(x, -KVL_HALF_MAX), KVL_HALF_MAX); }

/* Binary16 element i at p (2-byte aligned). */
float kvl_load_half(const KVL_GLOBAL uchar *p, ulong i) { return vload_half(i, (const KVL_GLOBAL half *)p); }
void kvl_store_half(KVL_GLOBAL uchar *p, ulong i, float x) { vstore_half_rte(x, i, (KVL_GLOBAL half *)p); }

#if KVL_VECTORS
float kvl_sum16(float16 v)
{
    const float8 a = v.lo + v.hi;
    const float4 b = a.lo + a.hi;
    const float2 c = b.lo + b.hi;
    return c.x + c.y;
}
float kvl_max16(float16 v)
{
    const float8 a = fmax(v.lo, v.hi);
    const float4 b = fmax(a.lo, a.hi);
    const float2 c = fmax(b.lo, b.hi);
    return fmax(c.x, c.y);
}
#endif
