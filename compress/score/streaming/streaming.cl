/* The position: of tokens that nothing protects the oldest goes first. Exact below 2^24. */
float kvl_score_position(uint position, ulong stream, uint parameter)
{
    return (float)position;
}
