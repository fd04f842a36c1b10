/* Minus the norm of the key: RoPE and rotations leave it as it is. */
float kvl_score_stored(const KVL_GLOBAL float *k, const KVL_GLOBAL float *v)
{
    float sum = 0.0f;
    for (uint c = 0; c < KVL_D; c++) sum = fma(k[c], k[c], sum);
    return -sqrt(sum);
}
