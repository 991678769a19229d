"""Drawing tokens and logprobs, against exact distributions, transformers' filters and torch.

All tests run on the reference and on the native kernels, which in the end are compared with each other.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch.utils._python_dispatch import TorchDispatchMode

from headrace import _native
from headrace.ops import sample as reference
from headrace.ops.cpu import CpuOps
from helpers.distribution import exact_distribution, p_value, transformers_distribution

DRAWS = 50_000
ALMOST_ONE = np.nextafter(1.0, 0.0)

FILTERS = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "top_k + top_p": {"temperature": 0.9, "top_k": 20, "top_p": 0.9},
    "all": {"temperature": 1.4, "top_k": 25, "top_p": 0.95, "min_p": 0.05},
}
# All tests of one run together wrongly fail with a probability of 1 in 1000, had they not fixed seeds.
THRESHOLD = 1e-3 / len(FILTERS)


@pytest.fixture(scope="module", autouse=True, params=["reference", "native"])
def implementation(request):
    """Sets `sample` and `logprobs` for the module's tests; a fixture for each test would not go with Hypothesis."""
    global sample, logprobs
    source = reference if request.param == "reference" else CpuOps(threads=2)
    sample, logprobs = source.sample, source.logprobs
    return request.param


def draw(logits, uniform, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """One token for each uniform number, all with the same settings. logits: [V] or [N, V]."""
    uniform = torch.as_tensor(np.atleast_1d(uniform), dtype=torch.float64)
    n = len(uniform)
    logits = torch.as_tensor(np.asarray(logits), dtype=torch.float32).expand(n, -1)

    def full(value, dtype=torch.float64):
        return torch.full((n,), value, dtype=dtype)

    return sample(logits, full(temperature), full(top_k, torch.int64), full(top_p), full(min_p), uniform).numpy()


def example_logits(size=40, seed=5):
    """Logits that float32 holds exactly, without ties."""
    return np.random.default_rng(seed).normal(0, 2, size).astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_draws_follow_the_exact_distribution(filters):
    logits = example_logits()
    distribution = exact_distribution(logits, **filters)
    np.testing.assert_allclose(distribution, transformers_distribution(logits, **filters), atol=1e-12)
    draws = draw(logits, np.random.default_rng(11).random(DRAWS), **filters)
    assert p_value(draws, distribution) > THRESHOLD


@pytest.mark.parametrize(
    ("asked", "done"),
    [
        ({"temperature": 1.0}, {"temperature": 1.1}),
        ({"top_k": 7}, {"top_k": 6}),
        ({"top_k": 7}, {"top_k": 8}),
        ({"top_p": 0.8}, {"top_p": 0.85}),
        ({"min_p": 0.1}, {"min_p": 0.15}),
    ],
)
def test_the_statistics_notice_a_slightly_wrong_filter(asked, done):
    draws = draw(example_logits(), np.random.default_rng(11).random(DRAWS // 5), **done)
    assert p_value(draws, exact_distribution(example_logits(), **asked)) < THRESHOLD / 100


ERROR = 1e-6


@settings(max_examples=150, deadline=None)
@given(
    logits=npst.arrays(np.float64, st.integers(1, 60), elements=st.integers(-12, 12).map(lambda x: x / 4)),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 70),
    top_p=st.sampled_from([0.001, 0.31, 0.5003, 0.9001, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.21, 1.0]),
)
def test_every_token_is_drawn_by_its_own_part_of_the_unit_interval(logits, temperature, top_k, top_p, min_p):
    """Ties are everywhere here: they are kept or dropped as documented, and the order is that of the ids."""
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    distribution = exact_distribution(logits, **filters)
    ends = distribution.cumsum()
    # The borders between tokens are known to float32's precision only, so none is probed more closely than ERROR.
    kept = (distribution > 4 * ERROR).nonzero()[0]
    share = distribution[kept]
    for place in (1e-4, 0.5, 1 - 1e-4):
        uniform = ends[kept] - share + (share * place).clip(ERROR, share - ERROR)
        np.testing.assert_array_equal(draw(logits, uniform, **filters), kept)


def test_the_nucleus_is_the_smallest_set_that_holds_top_p():
    logits = np.log([0.12, 0.5, 0.13, 0.25])
    u = (np.arange(1000) + 0.5) / 1000
    for top_p, kept in [
        (1e-9, {1}),
        (0.49, {1}),
        (0.51, {1, 3}),
        (0.74, {1, 3}),
        (0.76, {1, 2, 3}),
        (0.89, {0, 1, 2, 3}),
    ]:
        assert set(draw(logits, u, top_p=top_p)) == kept


def test_all_that_are_as_likely_as_the_last_one_kept_are_kept():
    u = (np.arange(1000) + 0.5) / 1000
    logits = [1.0, 3.0, 2.0, 2.0, 2.0, 0.0]
    assert set(draw(logits, u, top_k=2)) == {1, 2, 3, 4}
    assert set(draw(logits, u, top_p=0.5)) == {1, 2, 3, 4}
    assert set(draw(logits, u, top_k=1, top_p=0.5)) == {1}


def test_top_k_beyond_the_vocabulary_keeps_all():
    assert set(draw([1.0, 3.0, 2.0], (np.arange(1000) + 0.5) / 1000, top_k=1_000_000)) == {0, 1, 2}


@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 3, "top_p": 0.9, "min_p": 0.05}],
    ids=str,
)
def test_a_filtered_token_is_never_drawn_even_at_the_ends(filters):
    rng = np.random.default_rng(3)
    for size in (2, 5, 1000, 50_257):
        logits = rng.normal(0, 3, size)
        logits[[0, -1]] = -np.inf  # the ends of the cumulative sum are where rounding would show
        if size == 2:
            logits[0] = 1.0
        distribution = exact_distribution(logits.astype(np.float32).astype(np.float64), **filters)
        tokens = draw(logits, [0.0, 1e-300, ALMOST_ONE], **filters)
        assert (distribution[tokens] > 0).all()
        assert tokens[0] == tokens[1] == distribution.nonzero()[0][0]
        # Tokens at the upper end that are too unlikely for float64 to tell from 1 need not be reached.
        assert distribution[tokens[2] + 1 :].sum() < 1e-7


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals():
    logits = np.array([[1.0, 5.0, 5.0, 2.0], [0.0, 0.0, 0.0, 0.0], [-3.0, -2.0, -1.0, -1.0]])
    for extra in ({}, {"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.5}):
        np.testing.assert_array_equal(draw(logits, np.full(3, 0.99), temperature=0.0, **extra), [1, 0, 2])
    np.testing.assert_array_equal(draw(logits, np.full(3, 0.99), temperature=1e-45), [1, 0, 2])  # 0 in float32


@pytest.mark.parametrize("temperature", [1e-37, 1e-6, 1e-3, 1.0, 100.0])
@pytest.mark.parametrize("size", [1e-38, 1.0, 1e4, 3e38])
def test_extreme_numbers_do_not_overflow(temperature, size):
    logits = size * np.array([-1.0, 0.5, 1.0, -0.25, 0.999])
    filters = {"temperature": temperature, "top_k": 4, "top_p": 0.999, "min_p": 0.0001}
    tokens = draw(logits, [0.0, 0.5, ALMOST_ONE], **filters)
    if size / temperature > 1e5:
        np.testing.assert_array_equal(tokens, 2)  # all others are e^-100 times as likely
    assert set(tokens) <= {1, 2, 3, 4}


def test_equal_logits_share_at_any_temperature():
    u = (np.arange(100) + 0.5) / 100
    for temperature in (1e-37, 1e-6, 1.0):
        counts = np.bincount(draw([3e38, 0.0, 3e38], u, temperature=temperature))
        np.testing.assert_array_equal(counts, [50, 0, 50])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 2, "top_p": 0.5, "min_p": 0.5}], ids=str
)
def test_logits_that_are_no_numbers(temperature, filters):
    nan, inf = np.nan, np.inf
    logits = np.array(
        [[nan] * 4, [-inf] * 4, [nan, -inf, -inf, nan], [nan, 1, nan, -inf], [9, inf, nan, 9], [1, 2, 30, 4]]
    )
    tokens = draw(logits, np.full(6, 0.7), temperature=temperature, **filters)
    np.testing.assert_array_equal(tokens, [0, 0, 0, 1, 1, 2])


def test_a_row_is_drawn_alone_as_in_a_batch():
    rng = np.random.default_rng(0)
    n, v = 24, 5003  # an odd width, so that rows start at every alignment
    logits = torch.from_numpy(rng.normal(0, 3, (n, v)).astype(np.float32))
    logits[5, 7] = torch.nan  # one bad row must not change how the others are treated
    columns = [
        torch.from_numpy(rng.choice([0.0, 0.5, 1.0, 1.3], n)),
        torch.from_numpy(rng.choice([0, 1, 50, 4000], n)),
        torch.from_numpy(rng.choice([1.0, 0.9, 0.3], n)),
        torch.from_numpy(rng.choice([0.0, 0.01, 0.2], n)),
        torch.from_numpy(rng.random(n)),
    ]
    together = sample(logits, *columns)
    chosen, top_values, top_ids = logprobs(logits, together, 4)
    order = torch.from_numpy(rng.permutation(n))
    torch.testing.assert_close(sample(logits[order], *(c[order] for c in columns)), together[order], rtol=0, atol=0)
    for row in range(n):
        alone = slice(row, row + 1)
        assert torch.equal(sample(logits[alone].clone(), *(c[alone] for c in columns)), together[alone])
        reports = logprobs(logits[alone].clone(), together[alone], 4)
        for one, all_rows in zip(reports, (chosen, top_values, top_ids), strict=True):
            assert torch.equal(one, all_rows[alone])


def test_the_number_of_threads_changes_nothing():
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 3, (2, 150_001)).astype(np.float32))
    u = torch.tensor([0.3, 0.8], dtype=torch.float64)
    ones = torch.ones(2, dtype=torch.float64)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            tokens = sample(logits, ones, torch.tensor([0, 500]), ones * 0.95, ones * 0.01, u)
            results.append((tokens, *logprobs(logits, tokens, 5)))
    finally:
        torch.set_num_threads(threads)
    for one, three in zip(*results, strict=True):
        assert torch.equal(one, three)


def test_sample_leaves_its_input_alone_and_takes_an_empty_batch():
    logits = torch.tensor([[1.0, torch.nan, 3.0]])
    before = logits.clone()
    draw(logits, 0.5, top_k=2, top_p=0.9, min_p=0.1)
    logprobs(logits, torch.tensor([0]), 2)
    torch.testing.assert_close(logits, before, equal_nan=True, rtol=0, atol=0)
    empty = torch.empty(0, dtype=torch.float64)
    assert sample(torch.empty(0, 5), empty, torch.empty(0, dtype=torch.int64), empty, empty, empty).shape == (0,)


class OpsUsed(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_nothing_is_sorted_where_no_filter_needs_it(implementation):
    if implementation == "native":
        pytest.skip("torch's operations are counted")

    def used(**filters):
        with OpsUsed() as ops:
            draw(example_logits(), [0.5, 0.6], **filters)
        return ops.names

    assert not used(temperature=0.0, top_k=5, top_p=0.9) & {"exp", "cumsum", "sort", "topk", "div"}
    assert not used(min_p=0.1) & {"sort", "topk"}
    assert "topk" in used(top_k=5)
    assert "sort" in used(top_p=0.9)


@settings(max_examples=60, deadline=None)
@given(
    logits=npst.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 50)),
        elements=st.floats(-1e4, 1e4, width=32) | st.integers(-3, 3).map(float),
    ),
    top=st.integers(0, 60),
    data=st.data(),
)
def test_logprobs_are_the_log_softmax_and_ordered(logits, top, data):
    n, v = logits.shape
    ids = np.array(data.draw(st.lists(st.integers(0, v - 1), min_size=n, max_size=n)))
    chosen, top_values, top_ids = (t.numpy() for t in logprobs(torch.from_numpy(logits), torch.from_numpy(ids), top))
    wide = logits.astype(np.float64)
    peak = wide.max(-1, keepdims=True)
    exact = wide - peak - np.log(np.exp(wide - peak).sum(-1, keepdims=True))
    rows = np.arange(n)
    np.testing.assert_allclose(chosen, exact[rows, ids], rtol=1e-6, atol=2e-6)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :top]  # most likely first, lower ids first among equals
    np.testing.assert_array_equal(top_ids, order)
    np.testing.assert_allclose(top_values, np.take_along_axis(exact, order, -1), rtol=1e-6, atol=2e-6)
    assert (np.diff(top_values, axis=-1) <= 0).all()


def test_logprobs_of_logits_that_are_no_numbers():
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[nan, nan, nan], [-inf, -inf, -inf], [0.0, nan, 0.0], [inf, 5.0, inf]])
    chosen, top_values, top_ids = logprobs(logits, torch.tensor([1, 1, 1, 0]), 2)
    half = -float(np.log(2))
    torch.testing.assert_close(chosen, torch.tensor([-inf, -inf, -inf, half]))
    torch.testing.assert_close(top_values, torch.tensor([[-inf, -inf], [-inf, -inf], [half, half], [half, half]]))
    assert top_ids.tolist() == [[0, 1], [0, 1], [0, 2], [0, 2]]


def test_native_tokens_are_those_of_the_reference(implementation):
    """All filters at once, flat and steep rows, ties, and numbers that are none; the same on every instruction set."""
    if implementation == "reference":
        pytest.skip("both are compared already")
    rng = np.random.default_rng(3)
    n, v = 300, 1237
    logits = rng.normal(0, rng.choice([0.01, 1, 5, 40], (n, 1)), (n, v))
    logits[::3] = np.round(logits[::3])
    logits[rng.random((n, v)) < rng.choice([0, 0.01, 0.9], (n, 1))] = -np.inf
    logits[::17, 5], logits[::29, 6], logits[7] = np.nan, np.inf, -np.inf
    logits = torch.from_numpy(logits.astype(np.float32))
    columns = [
        torch.from_numpy(rng.choice([0.0, 1e-39, 1e-3, 0.5, 1.0, 1.7], n)),
        torch.from_numpy(rng.choice([0, 1, 2, 50, 1236, 1237, 5000], n)),
        torch.from_numpy(rng.choice([1.0, 0.9, 0.3, 1e-6], n)),
        torch.from_numpy(rng.choice([0.0, 0.01, 0.2, 1.0], n)),
        torch.from_numpy(rng.choice([0.0, 0.999999, 0.25, 0.5], n)),
        torch.from_numpy(rng.choice([2.0, 0.1, 0.5], n)),
    ]
    expected = reference.sample(logits, *columns)
    reports = reference.logprobs(logits, expected, 40)
    wide = torch.empty(n, v + 3)[:, :v].copy_(logits)  # rows that are apart
    before = _native.isa()
    for isa in _native.available_isas():
        _native.select_isa(isa)
        assert torch.equal(sample(wide, *columns), expected)
        for found, report in zip(logprobs(wide, expected, 40), reports, strict=True):
            torch.testing.assert_close(found, report, rtol=1e-6, atol=2e-6)
    _native.select_isa(before)


def test_what_the_native_kernels_refuse(implementation):
    if implementation == "reference":
        pytest.skip("it is torch that refuses")
    ones = torch.ones(1, dtype=torch.float64)
    with pytest.raises(ValueError, match="must be float32"):
        sample(torch.zeros(1, 5).double(), ones, ones.long(), ones, ones, ones)
    with pytest.raises(IndexError, match="from 0 to 4"):
        logprobs(torch.zeros(1, 5), torch.tensor([5]), 1)
