/* The noise of random.c, to the bit: 53 bits, rounded once. */
float kvl_score_position(uint position, ulong stream, uint parameter)
{
    ulong z = parameter * 0xd1342543de82ef95ul + ((stream << 32 | position) + 1) * 0x9e3779b97f4a7c15ul;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ul;
    z = (z ^ z >> 27) * 0x94d049bb133111ebul;
    return (float)((z ^ z >> 31) >> 11) * 0x1p-53f;
}
