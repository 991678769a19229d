"""Random numbers as a function: no generator to seed, to share, or to lose when a worker dies."""

MASK = 2**64 - 1


def uniform(seed: int, index: int, position: int, stream: int = 0) -> float:
    """The uniform random number in [0, 1), of 53 bits, for one draw of one sequence.

    The same arguments give the same number always and everywhere. Numbers of different arguments are independent as
    far as any known test can tell: this is Philox4x64-10 with key (seed, index) and counter (position, stream, 0, 0),
    of which the first word is used (Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011).

    Args:
        seed: of the request; taken modulo 2**64.
        index: which of the request's sequences; 0 to 2**64 - 1.
        position: of the token to be drawn in its sequence; 0 to 2**64 - 1.
        stream: tells apart the numbers that one draw needs; 0 to 2**64 - 1.
    """
    # In plain Python: NumPy has the same generator, but building one for a single number takes three times as long.
    key0, key1 = seed & MASK, index
    word0, word1, word2, word3 = position, stream, 0, 0
    for _ in range(10):
        product0 = word0 * 0xD2E7470EE14C6C93
        product2 = word2 * 0xCA5A826395121157
        word0, word1 = (product2 >> 64) ^ word1 ^ key0, product2 & MASK
        word2, word3 = (product0 >> 64) ^ word3 ^ key1, product0 & MASK
        key0 = (key0 + 0x9E3779B97F4A7C15) & MASK
        key1 = (key1 + 0xBB67AE8584CAA73B) & MASK
    return (word0 >> 11) * 2.0**-53
