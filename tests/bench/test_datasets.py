"""Requests: as many and as long as was asked for, the same from the same seed, and the same as texts and as tokens."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from headrace.bench.datasets import DATASETS, DatasetSettings, Numbers, Sample, Words, samples
from headrace.errors import ConfigError
from headrace.formats.open import open_checkpoint
from helpers.model_files import smollm2

SOURCES = ["letters", "words", "numbers"]


@pytest.fixture(scope="module")
def sources(t0_directory: Path) -> dict[str, Words | Numbers]:
    """A tokenizer that knows letters only, one with words, and none."""
    t0, smol = (open_checkpoint(str(path)).tokenizer() for path in (t0_directory, smollm2()))
    return {"letters": Words(t0), "words": Words(smol), "numbers": Numbers()}


def made(source: Words | Numbers, **settings: Any) -> list[Sample]:
    return samples(DatasetSettings(**{"num_prompts": 5, "input_len": 120, **settings}), source)


def conversation_file(path: Path) -> str:
    talk = [{"from": "human" if i % 2 == 0 else "gpt", "value": f"{'word ' * (5 + i)}."} for i in range(6)]
    short, backwards = talk[:1], [{"from": "gpt", "value": "x"}, *talk]
    path.write_text(json.dumps([{"id": i, "conversations": c} for i, c in enumerate([talk, short, backwards, talk])]))
    return str(path)


def settings_of(name: str, tmp_path: Path) -> dict[str, Any]:
    if name == "sharegpt":
        return {"dataset_path": conversation_file(tmp_path / "talk.json")}
    if name == "trace":
        lines = [{"timestamp": 500 * i, "input_length": 10 + i, "output_length": 3 + i} for i in range(9)]
        (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return {"dataset_path": str(tmp_path / "trace.jsonl")}
    return {}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", DATASETS)
def test_the_same_seed_gives_the_same(
    name: str, source: str, sources: dict[str, Words | Numbers], tmp_path: Path
) -> None:
    given = {"dataset_name": name, **settings_of(name, tmp_path)}
    first, again, other = (made(sources[source], **given, dataset_seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other or name == "sharegpt"  # which here is the same conversation twice
    assert all(s.prompt and s.output_len >= 1 for s in first)
    assert len(first) == {"sharegpt": 2, "multi-turn": 20}.get(name, 5)


@pytest.mark.parametrize("source", ["letters", "words"])
@pytest.mark.parametrize("name", DATASETS)
def test_texts_make_their_tokens(name: str, source: str, sources: dict[str, Words | Numbers], tmp_path: Path) -> None:
    """By the tokenizers library itself, as a server would read them."""
    path = smollm2() if source == "words" else None
    for sample in made(sources[source], dataset_name=name, **settings_of(name, tmp_path)):
        if path is None:
            assert sample.prompt == list(sample.text.encode())  # T0's tokens are bytes
        else:
            assert sample.prompt == _encode(sources[source], sample.text)


def _encode(source: Words | Numbers, text: str) -> list[int]:
    assert isinstance(source, Words)
    backend: tokenizers.Tokenizer = source._tokenizer._backend
    return backend.encode(text).ids


@pytest.mark.parametrize("source", SOURCES)
def test_random_prompts_are_as_long_as_asked(source: str, sources: dict[str, Words | Numbers]) -> None:
    for length in (1, 2, 33, 700):
        assert {(len(s.prompt), s.output_len) for s in made(sources[source], input_len=length, output_len=7)} == {
            (length, 7)
        }
    lengths = [len(s.prompt) for s in made(sources[source], num_prompts=200, input_len=100, range_ratio=0.5)]
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert len(set(lengths)) > 50


def test_shared_prefixes_are_shared(sources: dict[str, Words | Numbers]) -> None:
    found = made(sources["words"], dataset_name="shared-prefix", num_prompts=6, prefix_len=64, num_prefixes=2)
    beginnings = [tuple(s.prompt[:64]) for s in found]
    assert beginnings[0::2] == [beginnings[0]] * 3
    assert beginnings[1::2] == [beginnings[1]] * 3
    assert beginnings[0] != beginnings[1]
    assert len({tuple(s.prompt) for s in found}) == 6
    assert {len(s.prompt) for s in found} == {184}


def test_a_turn_begins_with_those_before(sources: dict[str, Words | Numbers], tmp_path: Path) -> None:
    for path in (None, conversation_file(tmp_path / "talk.json")):
        found = made(sources["words"], dataset_name="multi-turn", num_prompts=2, num_turns=3, dataset_path=path)
        assert [s.session for s in found] == [0, 0, 0, 1, 1, 1]
        for one, next_one in itertools.pairwise(found):
            if one.session == next_one.session:
                assert next_one.text.startswith(one.text)
                assert len(next_one.text) > len(one.text)


def test_long_and_code_prompts_have_their_length(sources: dict[str, Words | Numbers]) -> None:
    for name in ("long-context", "code-edit"):
        for sample in made(sources["words"], dataset_name=name, input_len=500):
            assert 400 <= len(sample.prompt) <= 500
    edit = made(sources["words"], dataset_name="code-edit", input_len=500)[0]
    assert 350 < edit.output_len < 500  # the program again


def test_traces(sources: dict[str, Words | Numbers], tmp_path: Path) -> None:
    for source in sources.values():
        found = made(source, dataset_name="trace", **settings_of("trace", tmp_path))
        assert [(len(s.prompt), s.output_len, s.arrival) for s in found] == [(10 + i, 3 + i, 0.5 * i) for i in range(5)]
    (tmp_path / "azure.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,37,4\n2023-11-16 18:17:04.2299600,39,8\n"
    )
    found = made(sources["numbers"], dataset_name="trace", dataset_path=str(tmp_path / "azure.csv"))
    assert [(len(s.prompt), s.output_len, round(s.arrival or 0, 3)) for s in found] == [(37, 4, 0), (39, 8, 0.25)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset_name": "shargpt"}, "dataset_name must be one of random, sharegpt"),
        ({"num_prompts": 0}, "num_prompts must be at least 1"),
        ({"range_ratio": 1.0}, "range_ratio must be from 0 to below 1"),
        ({"dataset_name": "trace"}, "needs the file"),
        ({"dataset_path": "x"}, "the random dataset reads no file"),
        ({"dataset_name": "trace", "dataset_path": "/nowhere"}, "/nowhere cannot be read"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(Numbers(), **settings)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sharegpt", "no json"), ("sharegpt", "{}"), ("sharegpt", "[]"), ("sharegpt", '[{"conversations": [1, 2]}]'),
        ("trace", "a,b\n1,2"), ("trace", '{"timestamp": 1}'), ("trace", '{"timestamp": 1, "input_length": 0, '
         '"output_length": 1}'), ("trace", ""), ("trace", '{"timestamp": 5, "input_length": 1, "output_length": 1}\n'
         '{"timestamp": 4, "input_length": 1, "output_length": 1}'),
    ],
)  # fmt: skip
def test_damaged_files_are_named(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ConfigError, match=str(tmp_path / "file")):
        made(Numbers(), dataset_name=name, dataset_path=str(tmp_path / "file"))
