/* The position: of tokens that nothing protects the oldest goes first. Exact below 2^24. */
float kvl_score_stored(const KVL_GLOBAL float *k, const KVL_GLOBAL float *v, uint position, ulong stream, uint parameter)
{
    return (float)position;
}
