"""Decoding of blocks, against the `gguf` package: bit for bit, on random bytes."""

import tracemalloc

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from headrace.formats.ggml_blocks import BLOCK_TYPES, BlockType
from headrace.formats.gguf_checkpoint import CHUNK_VALUES, GGMLWeight

TYPES = pytest.mark.parametrize("block_type", BLOCK_TYPES.values(), ids=lambda block_type: block_type.name)


def reference(rows: np.ndarray, block_type: BlockType) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return dequantize(rows, GGMLQuantizationType(block_type.number))


def random_rows(block_type: BlockType, rows: int, values: int) -> np.ndarray:
    """Every bit is random, so that among the scales there are infinite, subnormal and negative ones and NaN."""
    row_bytes = values // block_type.block_size * block_type.block_bytes
    return np.random.default_rng(block_type.number).integers(0, 256, (rows, row_bytes), dtype=np.uint8)


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    """The same float32 values bit by bit, but for the bits of NaN."""
    assert found.dtype == expected.dtype == np.float32
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


def test_all_types_of_the_formats_that_we_read() -> None:
    names = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
    assert {block_type.name for block_type in BLOCK_TYPES.values()} == names | {"IQ4_NL", "IQ4_XS"}


@TYPES
def test_number_name_and_size(block_type: BlockType) -> None:
    kind = GGMLQuantizationType[block_type.name]
    assert block_type.number == kind.value
    assert (block_type.block_size, block_type.block_bytes) == GGML_QUANT_SIZES[kind]


@TYPES
def test_values(block_type: BlockType) -> None:
    rows = random_rows(block_type, 512, 1024)
    expected = reference(rows, block_type)
    assert np.isnan(expected).any()  # so scales that are no ordinary numbers are among them
    found = block_type.dequantize(rows.reshape(-1, block_type.block_bytes))
    assert_same_bits(found.reshape(expected.shape), expected)


@TYPES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_in_chunks(block_type: BlockType, dtype: torch.dtype) -> None:
    """More values than are decoded at once, in rows that do not divide a chunk."""
    shape = (3, CHUNK_VALUES // 256 // 2, 256)
    rows = random_rows(block_type, shape[0] * shape[1], shape[2])
    weight = GGMLWeight(rows, block_type, shape)
    found = weight.dequantize(dtype)
    expected = torch.from_numpy(reference(rows, block_type).reshape(shape)).to(dtype)
    assert found.dtype == dtype
    assert found.shape == shape
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@TYPES
def test_a_weight_as_whole_numbers(block_type: BlockType) -> None:
    """More blocks than are unpacked at once; the codes have the bits that the type says."""
    rows = random_rows(block_type, CHUNK_VALUES // 512 + 3, 768)
    found = GGMLWeight(rows, block_type, (len(rows), 768)).integers()
    if block_type.name in ("F32", "F16", "BF16"):
        assert found is None
        return
    assert found is not None
    assert_same_bits(found.dequantize().numpy(), reference(rows, block_type))
    span = 2**found.bits
    low = 0 if found.codes.dtype == torch.uint8 else -(span // 2)
    assert found.codes.min().item() >= low
    assert found.codes.max().item() < low + span


def test_a_vector_has_no_whole_numbers() -> None:
    block_type = next(block_type for block_type in BLOCK_TYPES.values() if block_type.name == "Q8_0")
    assert GGMLWeight(random_rows(block_type, 1, 64), block_type, (64,)).integers() is None


@pytest.mark.parametrize("name", ["F32", "Q4_1", "Q6_K", "IQ4_XS"])
def test_memory_for_a_large_weight_is_bounded(name: str) -> None:
    block_type = next(block_type for block_type in BLOCK_TYPES.values() if block_type.name == name)
    blocks = np.zeros((1 << 12, (1 << 12) // block_type.block_size * block_type.block_bytes), np.uint8)
    weight = GGMLWeight(blocks, block_type, (1 << 12, 1 << 12))
    tracemalloc.start()
    values = weight.dequantize(torch.bfloat16)
    peak = tracemalloc.get_traced_memory()[1]  # NumPy's allocations; the result is torch's
    tracemalloc.stop()
    assert values.numel() == 1 << 24
    assert peak < 32 * 2**20


def test_the_result_is_memory_of_its_own() -> None:
    rows = np.arange(16, dtype=np.float32).view(np.uint8).reshape(2, 32)
    rows.flags.writeable = False
    values = GGMLWeight(rows, BLOCK_TYPES[0], (2, 8)).dequantize()
    values[0, 0] = 100
    assert rows.view(np.float32)[0, 0] == 0
