"""Counter-based random numbers, against the published test vectors, NumPy's generator and scipy's statistics."""

import numpy as np
import pytest
from scipy import stats

from headrace.sampling.random import uniform

ALL_ONES = 2**64 - 1


def philox4x64(counter, key):
    """Philox4x64-10 word by word as the paper defines it (Salmon et al. 2011, section 3.3)."""

    def mulhilo(a, b):
        return divmod(a * b, 2**64)

    for round_number in range(10):
        if round_number:
            key = [(key[0] + 0x9E3779B97F4A7C15) % 2**64, (key[1] + 0xBB67AE8584CAA73B) % 2**64]
        high0, low0 = mulhilo(0xD2E7470EE14C6C93, counter[0])
        high1, low1 = mulhilo(0xCA5A826395121157, counter[2])
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
    return counter


def test_the_oracle_gives_the_published_numbers():
    """The known answers that come with the authors' library, Random123."""
    zeros = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert philox4x64([0] * 4, [0] * 2) == zeros
    ones = [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0]
    assert philox4x64([ALL_ONES] * 4, [ALL_ONES] * 2) == ones


@pytest.mark.parametrize("seed", [0, 1, 42, 2**63, ALL_ONES])
@pytest.mark.parametrize("index", [0, 1, 127, ALL_ONES])
@pytest.mark.parametrize("position", [0, 1, 77, 131_071, ALL_ONES])
def test_it_is_philox(seed, index, position):
    for stream in (0, 1, ALL_ONES):
        word = philox4x64([position, stream, 0, 0], [seed, index])[0]
        assert uniform(seed, index, position, stream) == (word >> 11) / 2**53


def test_numpy_gives_the_same():
    for seed, index, position in [(0, 0, 1), (7, 3, 1), (ALL_ONES, 127, 5000), (2**63 + 5, 0, 2**40)]:
        # NumPy counts up before it draws.
        generator = np.random.Philox(key=np.array([seed, index], dtype=np.uint64), counter=position - 1)
        assert uniform(seed, index, position) == np.random.Generator(generator).random()


def test_a_negative_seed_counts_from_the_top():
    assert uniform(-1, 0, 5) == uniform(ALL_ONES, 0, 5)


def test_it_is_a_function():
    again = [(s, i, p) for s in (1, 2) for i in (0, 1) for p in (0, 1)]
    first = [uniform(*a) for a in again]
    assert [uniform(*a) for a in reversed(again)] == first[::-1]
    assert len(set(first)) == len(first)


N = 20_000
SEQUENCES = {
    "positions": lambda i: (1234, 0, i),
    "seeds": lambda i: (i, 0, 10),
    "indices": lambda i: (1234, i, 10),
    "the diagonal": lambda i: (i, i, i),
}


@pytest.mark.parametrize("sequence", SEQUENCES.values(), ids=SEQUENCES)
def test_uniform_and_uncorrelated(sequence):
    numbers = np.array([uniform(*sequence(i)) for i in range(N)])
    assert 0 <= numbers.min() < 10 / N
    assert 1 - 10 / N < numbers.max() < 1
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3
    # Neighbours in any of the three arguments must not know of each other.
    for lag in (1, 2, 7):
        assert stats.pearsonr(numbers[:-lag], numbers[lag:]).pvalue > 1e-3
    pairs = np.histogram2d(numbers[::2], numbers[1::2], bins=8, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-3


def test_seeds_and_indices_do_not_share_numbers():
    """Sequence 1 of seed 0 is not sequence 0 of seed 1, nor a shifted copy of any near it."""
    streams = [np.array([uniform(s, i, p) for p in range(2000)]) for s in range(3) for i in range(3)]
    for a in range(len(streams)):
        for b in range(a):
            assert not np.intersect1d(streams[a], streams[b]).size
            assert stats.pearsonr(streams[a], streams[b]).pvalue > 1e-4
