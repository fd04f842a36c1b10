/* Minus the cosine of a key and the mean direction of all keys, but for the mean's length, which is the same for all. */
float kvl_key_length(const float *k)
{
    float sum = 0.0f;
    for (uint c = 0; c < KVL_D; c++) sum = fma(k[c], k[c], sum);
    return fmax(sqrt(sum), 1e-12f);
}

float kvl_score_weight(const float *k) { return 1.0f / kvl_key_length(k); }

float kvl_score_key(const float *k, const KVL_QS float *mean)
{
    float dot = 0.0f;
    for (uint c = 0; c < KVL_D; c++) dot = fma(k[c], mean[c], dot);
    return -dot / kvl_key_length(k);
}
