"""How the KV cache is cut to fit, what is said about it, and how sizes are written."""

import logging
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.config import EngineConfig, byte_size
from headrace.errors import CapacityError, ConfigError
from headrace.models.config import DecoderConfig
from headrace.models.families import decoder_config
from headrace.ops.reference import Ops
from headrace.worker.cache_size import size_cache
from headrace.worker.memory import Available
from helpers.tiny import t0_config

T0 = decoder_config(t0_config())  # 2 layers, 2 KV heads of 16, 512 tokens
MODEL: DecoderConfig = replace(T0, num_layers=30, windows=(None,) * 30, num_kv_heads=3, head_dim=64, max_position=8192)
FLOAT32_TOKEN, INT8_TOKEN = 2 * 30 * 3 * 64 * 4, 2 * 30 * 3 * (64 + 2)
MACHINE = Available(2**29, "the machine's free memory")


def size(
    available: Available = MACHINE, dtype: torch.dtype = torch.float32, model: DecoderConfig = MODEL, **settings: Any
):
    return size_cache(EngineConfig(model="m", **settings), model, dtype, available)


@pytest.mark.parametrize(("dtype", "gain"), [(torch.float32, 1), (torch.bfloat16, 2), (torch.int8, 3.88)])
def test_tokens_in_the_same_memory(dtype: torch.dtype, gain: float) -> None:
    tokens = 32 * size(dtype=dtype, max_model_len="auto").num_blocks
    assert tokens == pytest.approx(gain * 2**28 / FLOAT32_TOKEN, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_a_block_takes_what_is_reckoned(dtype: torch.dtype) -> None:
    plan = size(dtype=dtype, block_size=8)
    cache = Ops().kv_cache(5, 8, MODEL.num_kv_heads, MODEL.head_dim, dtype)
    parts = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    taken = sum(p.numel() * p.element_size() for p in parts if p is not None)
    assert taken * MODEL.num_layers == 5 * plan.block_bytes


def test_no_more_than_the_sequences_can_fill() -> None:
    plan = size(max_model_len=100, max_num_seqs=3, max_num_batched_tokens=64)
    assert plan.num_blocks == 3 * 4
    assert plan.max_model_len == 100


def test_memory_that_is_given_counts_whatever_is_free() -> None:
    plan = size(Available(0, ""), kv_cache_memory=f"{100 * 32 * FLOAT32_TOKEN}")
    assert (plan.num_blocks, plan.max_model_len) == (100, 3200)


def test_auto_takes_the_models_limit_where_it_fits() -> None:
    assert size(Available(2**40, "")).max_model_len == 8192
    assert size(Available(2**40, ""), max_model_len=None).max_model_len == 8192


def test_auto_cuts_to_what_fits_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    plan = size()
    assert plan.max_model_len == 32 * plan.num_blocks == 2**28 // FLOAT32_TOKEN // 32 * 32
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert re.search(rf"from 8192 to {plan.max_model_len} tokens.*256 MiB.*machine's free memory", warning)


def test_what_is_said_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    size(kv_cache_memory=100 * 32 * FLOAT32_TOKEN, max_model_len=1600, swap_space=10 * 32 * FLOAT32_TOKEN)
    (line,) = (r.getMessage() for r in caplog.records)
    assert line.startswith("KV cache: 100 blocks = 3200 tokens = 2.0 sequences of max length 1600; ")
    assert line.endswith("of float32, and 10 blocks to swap to")


def test_swap_space_is_not_given_twice() -> None:
    without, with_swap = size(), size(swap_space="256MiB")
    assert without.num_host_blocks == 0
    assert with_swap.num_host_blocks == 2**28 // (32 * FLOAT32_TOKEN)
    assert with_swap.num_blocks == without.num_blocks // 2


def test_swap_space_that_holds_nothing_is_no_swap_space() -> None:
    block = 32 * FLOAT32_TOKEN
    assert size(swap_space=block).num_host_blocks == 1
    with pytest.raises(CapacityError, match=f"give at least {block} bytes, or 0"):
        size(swap_space=block - 1)


class TestSomeLayersWithAWindow:
    """Eight layers, of which two see everything: four groups of two."""

    MODEL = replace(MODEL, num_layers=8, windows=(512, 512, 512, None) * 2)
    BLOCK = 2 * 2 * 3 * 64 * 4 * 32  # bytes of two layers

    def test_windowed_layers_need_no_more_than_they_see_and_a_step(self) -> None:
        most = 256 + 3 * ((512 + 1024) // 32 + 1)
        plan = size(Available(2**40, ""), model=self.MODEL, max_num_batched_tokens=1024, max_num_seqs=4)
        assert (plan.block_bytes, plan.num_blocks) == (self.BLOCK, 4 * most)
        exact = {"model": self.MODEL, "max_num_batched_tokens": 1024, "kv_cache_memory": most * self.BLOCK}
        assert size(**exact, max_model_len=8192).num_blocks == most
        assert size(**exact | {"kv_cache_memory": most * self.BLOCK - 1}).max_model_len == 8192 - 32

    def test_what_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        size(model=self.MODEL, max_num_batched_tokens=64, kv_cache_memory=200 * self.BLOCK, max_model_len=1600)
        (line,) = (r.getMessage() for r in caplog.records)
        assert line.startswith("KV cache: 200 blocks = 2990 tokens = 1.9 sequences of max length 1600; ")

    def test_what_the_message_proposes_fits(self) -> None:
        memory = {"model": self.MODEL, "max_num_batched_tokens": 64, "kv_cache_memory": 100 * self.BLOCK}
        with pytest.raises(CapacityError) as error:
            size(**memory, max_model_len=8192)
        shorter = re.search(r"max_model_len of at most (\d+) \(or 'auto'\)", str(error.value))
        more = re.search(r"kv_cache_memory of at least .* \((\d+) bytes\)", str(error.value))
        assert shorter is not None
        assert more is not None
        assert size(**memory, max_model_len=int(shorter[1]))
        with pytest.raises(CapacityError):
            size(**memory, max_model_len=int(shorter[1]) + 1)
        assert size(**memory | {"kv_cache_memory": int(more[1])}, max_model_len=8192)

    def test_windows_as_long_as_the_context_are_none(self) -> None:
        assert size(model=self.MODEL, max_model_len=512).layout.windows == (None,)
        assert size(model=self.MODEL, max_model_len=513).layout.windows == (None, 512, 512, 512)

    def test_contiguous_memory_has_room_for_all(self) -> None:
        settings = {"kv_cache_layout": "contiguous", "block_size": 8192, "max_num_seqs": 2}
        plan = size(Available(2**40, ""), model=self.MODEL, **settings)
        assert (plan.num_blocks, plan.layout.windows, plan.layout.layers_per_group) == (2, (None,), 8)


class TestTooLarge:
    @staticmethod
    def message(*args: Any, **settings: Any) -> str:
        with pytest.raises(CapacityError) as error:
            size(*args, **settings)
        return str(error.value)

    def test_more_than_the_model_was_made_for(self) -> None:
        assert "at most 8192" in self.message(max_model_len=8193)

    def test_everything_that_the_message_proposes_fits(self) -> None:
        message = self.message(max_model_len=8192)
        assert "a context of 8192 tokens needs 360 MiB" in message
        assert "256 MiB for it (50% of the machine's free memory" in message
        shorter = re.search(r"max_model_len of at most (\d+) \(or 'auto'\)", message)
        assert shorter is not None
        assert size(max_model_len=int(shorter[1])).num_blocks * 32 == int(shorter[1])
        assert "at most" in self.message(max_model_len=int(shorter[1]) + 32)
        assert "kv_cache_dtype int8" in message
        assert size(max_model_len=8192, dtype=torch.int8).max_model_len == 8192
        more = re.search(r"kv_cache_memory of at least .* \((\d+) bytes\)", message)
        assert more is not None
        assert size(max_model_len=8192, kv_cache_memory=int(more[1])).num_blocks == 256
        assert "what would fit" in self.message(max_model_len=8192, kv_cache_memory=int(more[1]) - 1)

    def test_int8_may_need_a_shorter_context_too(self) -> None:
        message = self.message(max_model_len=8192, kv_cache_memory="64MiB")
        shorter = re.search(r"int8 with max_model_len of at most (\d+)", message)
        assert shorter is not None
        assert size(max_model_len=int(shorter[1]), kv_cache_memory="64MiB", dtype=torch.int8)

    def test_what_the_machine_lacks(self) -> None:
        group = Available(2**27, "the memory limit of the control group /x")
        message = self.message(group, max_model_len=8192)
        assert "control group /x" in message
        assert "more memory" in message
        assert "kv_cache_memory of" not in message

    @pytest.mark.parametrize("settings", [{}, {"max_model_len": 64}])
    def test_not_even_a_block(self, settings: dict[str, Any]) -> None:
        message = self.message(kv_cache_memory=1, **settings)
        assert "kv_cache_memory" in message
        assert "at most 0" not in message
        assert "a smaller block_size" in message


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("4GiB", 4 * 2**30),
        ("4 gib", 4 * 2**30),
        ("4G", 4 * 2**30),
        ("500MB", 500_000_000),
        ("1.5kB", 1500),
        ("0.1GB", 100_000_000),
        ("2TiB", 2**41),
        ("7B", 7),
        ("7.9", 7),
        (12, 12),
    ],
)
def test_sizes(text: str | int, number: int) -> None:
    assert byte_size(text) == number
    assert EngineConfig(model="m", kv_cache_memory=text, swap_space=text).kv_cache_memory == number


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "4 GiB of it", "4XB", "1e9", "4,5GB", "0x10", "0B", True, 1.5, -1]
)
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_memory must be an integer of at least 1 or a size like 4GiB"):
        EngineConfig(model="m", kv_cache_memory=text)


@pytest.mark.parametrize("length", ["", "Auto", "-1", "0", 0, True, 1.5, "9" * 5000])
def test_what_is_no_length(length: Any) -> None:
    with pytest.raises(ConfigError, match="max_model_len must be an integer of at least 1 or 'auto'"):
        EngineConfig(model="m", max_model_len=length)
