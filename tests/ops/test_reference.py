"""The reference ops against torch's own operators and transformers' layers, on ragged batches over a shuffled cache."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from headrace.formats.checkpoint import DenseWeight, IntegerWeight
from headrace.layers.rotary import frequencies
from headrace.ops import reference
from headrace.ops.reference import KVCache, Ops, RaggedBatch, integer_linear

OPS = Ops()
HEADS, KV_HEADS, DIM = 6, 2, 8


@dataclass
class Ragged:
    """Sequences of which `lens[i]` tokens are this step's and `before[i]` are in the cache already."""

    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    batch: RaggedBatch
    cache: KVCache


def ragged(
    lens: list[int],
    before: list[int],
    block_size: int = 4,
    seed: int = 0,
    kv_heads: int = KV_HEADS,
    dtype: torch.dtype = torch.float32,
) -> Ragged:
    g = torch.Generator().manual_seed(seed)
    total = [n + b for n, b in zip(lens, before, strict=True)]
    counts = [-(-t // block_size) for t in total]
    order = torch.randperm(sum(counts) + 3, generator=g).tolist()  # blocks in any order, three of them not in use
    cache = OPS.kv_cache(len(order), block_size, kv_heads, DIM, dtype)
    tables = [[order.pop() for _ in range(c)] for c in counts]
    keys = [torch.randn(t, kv_heads, DIM, generator=g) for t in total]
    values = [torch.randn(t, kv_heads, DIM, generator=g) for t in total]
    slots = [
        [tab[p // block_size] * block_size + p % block_size for p in range(t)]
        for tab, t in zip(tables, total, strict=True)
    ]
    for k, v, s in zip(keys, values, slots, strict=True):
        OPS.store_kv(k, v, cache, torch.tensor(s))
    widest = max(counts)
    batch = RaggedBatch(
        query_lens=lens,
        context_lens=total,
        positions=torch.cat([torch.arange(b, t) for b, t in zip(before, total, strict=True)]),
        slots=torch.cat([torch.tensor(s[b:]) for s, b in zip(slots, before, strict=True)]),
        block_tables=torch.tensor([t + [0] * (widest - len(t)) for t in tables]),
    )
    queries = [torch.randn(n, HEADS, DIM, generator=g) for n in lens]
    return Ragged(queries, keys, values, batch, cache)


def visible(n: int, total: int, window: int | None) -> Tensor:
    """Which keys each of the last n of `total` tokens sees."""
    queries, keys = torch.arange(total - n, total)[:, None], torch.arange(total)
    return (keys <= queries) & (keys > queries - (window or total))


def sdpa(r: Ragged, scale: float, window: int | None) -> Tensor:
    out = []
    for q, k, v in zip(r.queries, r.keys, r.values, strict=True):
        mask = visible(len(q), len(k), window)
        args = (x.transpose(0, 1)[None] for x in (q, k, v))
        out.append(
            F.scaled_dot_product_attention(*args, attn_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)
        )
    return torch.cat(out)


BATCHES = [
    ([1], [0]),
    ([1], [4]),
    ([4], [0]),
    ([5], [3]),
    ([1, 1, 1], [0, 30, 7]),
    ([3, 1, 8, 1, 2], [1, 15, 0, 16, 30]),
]


@pytest.mark.parametrize("window", [None, 1, 3, 5, 1000])
@pytest.mark.parametrize(("lens", "before"), BATCHES)
def test_attention_agrees_with_torch(lens: list[int], before: list[int], window: int | None) -> None:
    r = ragged(lens, before)
    got = OPS.attention(torch.cat(r.queries), r.cache, r.batch, scale=0.3, window=window)
    torch.testing.assert_close(got, sdpa(r, 0.3, window), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_attention_shares_keys_among_query_heads(kv_heads: int) -> None:
    r = ragged([3, 1], [2, 9], kv_heads=kv_heads)
    got = OPS.attention(torch.cat(r.queries), r.cache, r.batch, scale=1.0)
    torch.testing.assert_close(got, sdpa(r, 1.0, None), rtol=1e-5, atol=1e-6)


def test_attention_in_tiles_of_queries_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    r = ragged([23, 1, 9], [0, 5, 2])
    whole = OPS.attention(torch.cat(r.queries), r.cache, r.batch, scale=1.0)
    monkeypatch.setattr(reference, "MAX_SCORES", 500)  # three queries of the first sequence at a time
    torch.testing.assert_close(OPS.attention(torch.cat(r.queries), r.cache, r.batch, scale=1.0), whole)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_attention_softcap_is_gemma_2s_formula(softcap: float, window: int | None) -> None:
    r = ragged([5, 1], [2, 11])
    got = OPS.attention(torch.cat(r.queries), r.cache, r.batch, scale=2.0, softcap=softcap, window=window)
    expected = []
    for q, k, v in zip(r.queries, r.keys, r.values, strict=True):
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * 2.0
        scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~visible(len(q), len(k), window), -torch.inf)
        expected.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double()))
    torch.testing.assert_close(got.double(), torch.cat(expected), rtol=1e-5, atol=1e-6)


def test_attention_sinks_agree_with_gpt_oss() -> None:
    r = ragged([5, 1], [2, 11])
    sinks = torch.randn(HEADS, generator=torch.Generator().manual_seed(1))
    got = OPS.attention(torch.cat(r.queries), r.cache, r.batch, scale=0.7, sinks=sinks)
    module = torch.nn.Module()
    module.sinks, module.num_key_value_groups = sinks, HEADS // KV_HEADS
    module.eval()
    expected = []
    for q, k, v in zip(r.queries, r.keys, r.values, strict=True):
        mask = torch.zeros(1, 1, len(q), len(k)).masked_fill(~visible(len(q), len(k), None), -torch.inf)
        args = (x.transpose(0, 1)[None] for x in (q, k, v))
        expected.append(gpt_oss_attention(module, *args, mask, 0.7)[0][0])
    torch.testing.assert_close(got, torch.cat(expected), rtol=1e-5, atol=1e-6)


def test_attention_never_reads_a_block_of_another_sequence() -> None:
    r = ragged([3, 1], [2, 9])
    query = torch.cat(r.queries)
    before = OPS.attention(query, r.cache, r.batch, scale=1.0)
    used = {
        b
        for table, n in zip(r.batch.block_tables.tolist(), r.batch.context_lens, strict=True)
        for b in table[: -(-n // 4)]
    }
    for block in set(range(r.cache.keys.shape[1])) - used:
        r.cache.keys[:, block] = 1e9
        r.cache.values[:, block] = 1e9
    torch.testing.assert_close(OPS.attention(query, r.cache, r.batch, scale=1.0), before, rtol=0, atol=0)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("padding", "group"), [(0, 1), (0, 100), (10, 30), (10**6, 10**6)])
def test_attention_of_decodes_in_groups_is_the_same(
    monkeypatch: pytest.MonkeyPatch, padding: int, group: int, window: int | None
) -> None:
    monkeypatch.setattr(reference, "MAX_PADDING", padding)
    monkeypatch.setattr(reference, "MAX_GROUP", group)
    r = ragged([1, 3, 1, 1, 1, 1, 2], [40, 5, 3, 0, 41, 38, 0])
    got = OPS.attention(torch.cat(r.queries), r.cache, r.batch, scale=0.3, window=window)
    torch.testing.assert_close(got, sdpa(r, 0.3, window), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("window", [None, 5])
def test_attention_does_not_see_what_others_left_in_its_blocks(window: int | None, dtype: torch.dtype) -> None:
    r = ragged([1, 1, 3, 1], [30, 1, 2, 9], dtype=dtype)
    query = torch.cat(r.queries)
    before = OPS.attention(query, r.cache, r.batch, scale=1.0, window=window)
    own = [
        table[p // 4] * 4 + p % 4
        for table, n in zip(r.batch.block_tables.tolist(), r.batch.context_lens, strict=True)
        for p in range(n)
    ]
    others = sorted(set(range(r.cache.keys.shape[1] * 4)) - set(own))
    nan = torch.full((len(others), KV_HEADS, DIM), torch.nan)
    OPS.store_kv(nan, nan, r.cache, torch.tensor(others))
    torch.testing.assert_close(OPS.attention(query, r.cache, r.batch, scale=1.0, window=window), before, rtol=0, atol=0)


def int8_scales(rows: np.ndarray) -> np.ndarray:
    """The smallest float16 at or above max|x| / 127 of each row, by NumPy's own neighbours of a float16."""
    exact = np.abs(rows).max(-1, keepdims=True) / np.float32(127)
    with np.errstate(over="ignore"):
        nearest = exact.astype(np.float16)
        above = np.where(nearest < exact, np.nextafter(nearest, np.float16(np.inf)), nearest)
    return np.minimum(above, np.finfo(np.float16).max)


def int8_and_back(x: Tensor) -> Tensor:
    """What an int8 cache must make of `[..., D]`, by the formula, in NumPy."""
    rows = x.float().numpy()
    scale = int8_scales(rows).astype(np.float32)
    codes = np.rint(np.divide(rows, scale, out=np.zeros_like(rows), where=scale > 0))
    assert np.abs(codes).max() <= 127
    return torch.from_numpy(codes * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_cache_is_the_formula(dtype: torch.dtype) -> None:
    """From scales that are subnormal float16 to nearly the largest."""
    cache = OPS.kv_cache(5, 4, KV_HEADS, DIM, torch.int8)
    assert cache.keys.dtype == cache.values.dtype == torch.int8
    magnitudes = 10.0 ** torch.tensor([-5, -4, -3, 0, 3, 5, 6])[:, None, None]
    key, value = ((torch.randn(7, KV_HEADS, DIM) * magnitudes).to(dtype) for _ in range(2))
    slots = torch.tensor([19, 0, 7, 3, 4, 12, 11])
    OPS.store_kv(key, value, cache, slots)
    for stored, scales, x in ((cache.keys, cache.key_scales, key), (cache.values, cache.value_scales, value)):
        assert scales is not None
        assert scales.dtype == torch.float16
        own = scales.flatten(1, 2)[:, slots, None].float().transpose(0, 1)
        assert np.array_equal(own.numpy(), int8_scales(x.float().numpy()).astype(np.float32))
        back = stored.flatten(1, 2)[:, slots].float().transpose(0, 1) * own
        torch.testing.assert_close(back, int8_and_back(x), rtol=1e-6, atol=0)
        assert ((back - x.float()).abs() <= own / 2 * (1 + 1e-5)).all()


def test_int8_cache_of_awkward_rows() -> None:
    smallest, largest = torch.finfo(torch.float32).smallest_normal, 127 * torch.finfo(torch.float16).max
    rows = torch.randn(12, 1, DIM)
    rows[0] = 0.0
    rows[1, 0, 3] = torch.nan
    rows[2, 0, 3] = torch.inf
    rows[3, 0, 3] = -torch.inf
    rows[4] = smallest * 1e-7  # the least number that is not zero: its scale underflows
    rows[5] = smallest
    rows[6] *= torch.finfo(torch.float32).max / 8
    rows[7, 0] = torch.tensor([-1.0, 1.0] * (DIM // 2))
    rows[8] = largest
    rows[9] = -largest * 1.001
    rows[10] = 127 * 2.0**-24  # the smallest scale of all, exactly
    rows[11] = 127 * 2.0**-24 * 1.01
    cache = OPS.kv_cache(3, 4, 1, DIM, torch.int8)
    OPS.store_kv(rows, rows, cache, torch.arange(12))
    assert cache.key_scales is not None
    scales = cache.key_scales.float().flatten()
    back = (cache.keys.float() * cache.key_scales[..., None].float()).flatten(0, 2)
    assert (back[0] == 0).all()
    assert back[1:4].isnan().all()
    assert (back[4] == 0).all()
    for row in (5, 7, 8, 10, 11):
        assert ((back[row] - rows[row, 0]).abs() <= scales[row] / 2).all()
    assert (back[6] == rows[6, 0].clamp(-largest, largest)).float().mean() > 0.9
    assert back[6].abs().max() == largest
    assert (back[8] == largest).all()
    assert (back[9] == -largest).all()
    assert (scales[[10, 11]] == torch.tensor([2.0**-24, 2.0**-23])).all()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("lens", "before"), BATCHES)
def test_attention_over_an_int8_cache(lens: list[int], before: list[int], window: int | None) -> None:
    r = ragged(lens, before, dtype=torch.int8)
    got = OPS.attention(torch.cat(r.queries), r.cache, r.batch, scale=0.3, window=window)
    r.keys, r.values = [int8_and_back(k) for k in r.keys], [int8_and_back(v) for v in r.values]
    torch.testing.assert_close(got, sdpa(r, 0.3, window), rtol=1e-5, atol=1e-6)


def contents(cache: KVCache) -> list[Tensor]:
    return [t for t in (cache.keys, cache.values, cache.key_scales, cache.value_scales) if t is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
class TestCopyBlocks:
    @staticmethod
    def cache(num_blocks: int, dtype: torch.dtype) -> KVCache:
        cache = OPS.kv_cache(num_blocks, 4, KV_HEADS, DIM, dtype)
        key, value = torch.randn(2, num_blocks * 4, KV_HEADS, DIM)
        OPS.store_kv(key, value, cache, torch.arange(num_blocks * 4))
        return cache

    def test_from_one_cache_to_another(self, dtype: torch.dtype) -> None:
        device, host = self.cache(6, dtype), self.cache(9, dtype)
        before = [[t.clone() for t in contents(c)] for c in (device, host)]
        OPS.copy_blocks(device, host, [(5, 0), (2, 8), (2, 3)])
        assert len(before[0]) == (4 if dtype == torch.int8 else 2)
        for old, new in zip(before[0], contents(device), strict=True):
            assert torch.equal(old, new)
        for read, old, new in zip(before[0], before[1], contents(host), strict=True):
            for block in range(9):
                expected = {0: read[:, 5], 8: read[:, 2], 3: read[:, 2]}.get(block, old[:, block])
                assert torch.equal(new[:, block], expected)

    def test_within_one_cache_all_are_read_first(self, dtype: torch.dtype) -> None:
        cache = self.cache(6, dtype)
        before = [t.clone() for t in contents(cache)]
        OPS.copy_blocks(cache, cache, [(0, 1), (1, 2), (4, 0)])
        for old, new in zip(before, contents(cache), strict=True):
            assert torch.equal(new, old[:, [4, 0, 1, 3, 4, 5]])

    def test_nothing_to_copy(self, dtype: torch.dtype) -> None:
        cache = self.cache(2, dtype)
        before = [t.clone() for t in contents(cache)]
        OPS.copy_blocks(cache, cache, [])
        assert all(map(torch.equal, before, contents(cache)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_agrees_with_torch(dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, 33).to(dtype)
    weight = torch.randn(33)
    expected = F.rms_norm(x.float(), (33,), weight, eps=1e-5).to(dtype)
    torch.testing.assert_close(OPS.rms_norm(x, weight, 1e-5), expected)
    assert OPS.rms_norm(x, weight, 1e-5).dtype == dtype
    assert OPS.rms_norm(torch.full((1, 4), torch.nan), torch.ones(4), 1e-5).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_agrees_with_transformers(dtype: torch.dtype) -> None:
    q, k = torch.randn(7, HEADS, DIM).to(dtype), torch.randn(7, KV_HEADS, DIM).to(dtype)
    positions = torch.tensor([0, 1, 5, 100, 2, 2, 8000])
    inv_freq, scale = frequencies(10_000.0, DIM, {})
    cos, sin = OPS.rotary_angles(positions, inv_freq, scale)
    full = (torch.cat([a, a], -1)[None] for a in (cos, sin))
    heads_first = (x.float().transpose(0, 1)[None] for x in (q, k))
    expected = apply_rotary_pos_emb(*heads_first, *full)
    for x, e in zip((q, k), expected, strict=True):
        torch.testing.assert_close(OPS.rotary(x, cos, sin), e[0].transpose(0, 1).to(dtype))


def test_partial_rotary_turns_the_first_entries_only() -> None:
    x = torch.randn(4, 2, DIM)
    inv_freq, _ = frequencies(500.0, 4, {})
    cos, sin = OPS.rotary_angles(torch.arange(4), inv_freq)
    got = OPS.rotary(x, cos, sin)
    assert torch.equal(got[..., 4:], x[..., 4:])
    # A turn in the plane of each pair, as complex numbers.
    turned = (
        torch.complex(x[..., :2], x[..., 2:4])
        * torch.polar(torch.ones(4, 2), torch.arange(4)[:, None] * inv_freq)[:, None]
    )
    torch.testing.assert_close(got[..., :4], torch.cat([turned.real, turned.imag], -1))


def test_embedding_linear_and_joined_matrices() -> None:
    weights = [torch.randn(n, 6) for n in (5, 2, 4)]
    joined = OPS.matrix([DenseWeight(w) for w in weights], torch.float32)
    assert joined.shape == (11, 6)
    x, bias = torch.randn(3, 6), torch.randn(11)
    torch.testing.assert_close(OPS.linear(x, joined, bias), x @ torch.cat(weights).T + bias)
    torch.testing.assert_close(OPS.linear(x, joined), x @ torch.cat(weights).T)
    ids = torch.tensor([0, 10, 10, 4])
    assert torch.equal(OPS.embedding(ids, joined), torch.cat(weights)[ids])
    assert torch.equal(OPS.embedding(ids, joined, 2.5), torch.cat(weights)[ids] * 2.5)


def test_a_matrix_owns_its_memory() -> None:
    source = torch.randn(3, 4)
    matrix = OPS.matrix([DenseWeight(source)], torch.float32)
    source.zero_()
    assert not torch.equal(matrix.data, source)


def test_gated_activations() -> None:
    x = torch.randn(5, 14)
    gate, up = x[:, :7], x[:, 7:]
    torch.testing.assert_close(OPS.gated(x, "silu"), gate * gate.sigmoid() * up)
    tanh = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    torch.testing.assert_close(OPS.gated(x, "gelu_tanh"), tanh * up)
    with pytest.raises(ValueError, match="swish2"):
        OPS.gated(x, "swish2")


def test_softcap_take_and_add() -> None:
    x = torch.tensor([[-1e9, 0.0, 1.0], [4.0, 5.0, 1e9]])
    torch.testing.assert_close(OPS.softcap(x, 30.0), 30 * torch.tanh(x / 30))
    assert torch.equal(OPS.take(x, torch.tensor([1, 1, 0])), x[[1, 1, 0]])
    assert OPS.take(x, torch.tensor([], dtype=torch.int64)).shape == (0, 3)
    assert torch.equal(OPS.add(x, x), 2 * x)


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_integer_linear(order: bool, asymmetric: bool) -> None:
    """Against whole numbers in NumPy: huge and tiny rows, zeros, NaN, more columns than float32 adds up exactly."""
    rng = np.random.default_rng(0)
    columns, size = 3000, 1100
    codes = rng.integers(0, 256, (5, columns)) if asymmetric else rng.integers(-127, 128, (5, columns))
    scales = rng.uniform(0.001, 0.01, (5, 3)).astype(np.float32)
    minimums = rng.normal(size=(5, 3)).astype(np.float32) if asymmetric else None
    places = rng.permutation(columns) if order else np.arange(columns)
    x = rng.normal(size=(6, columns)).astype(np.float32)
    x[1] *= 1e8
    x[2] *= 1e-30
    x[3] = 0
    x[4, 7] = 1e5
    x[5, 9] = np.nan
    weight = IntegerWeight(
        torch.from_numpy(codes).to(torch.uint8 if asymmetric else torch.int8),
        8,
        size,
        torch.from_numpy(scales),
        None if minimums is None else torch.from_numpy(minimums),
        torch.from_numpy(places) if order else None,
    )
    found = integer_linear(torch.from_numpy(x), weight).numpy()
    groups = np.arange(columns) // size
    values = codes * scales.astype(np.float64)[:, groups] + (0 if minimums is None else minimums[:, groups])
    step = np.maximum(np.abs(x[:5]).max(1, keepdims=True), 1e-38) / np.float32(127)
    rounded = np.rint(x[:5] / step).astype(np.float64)[:, places] * step
    expected = rounded @ values.T
    np.testing.assert_allclose(found[:5], expected, rtol=1e-4)
    assert np.isnan(found[5]).all()
