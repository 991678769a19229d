"""Calibration text from files, directories and the hub."""

import gzip
import io
import json
import zipfile
from pathlib import Path

import pytest

from headrace.errors import ConfigError, ModelError
from headrace.formats.open import open_checkpoint
from headrace.formats.tokenizer import Tokenizer
from headrace.quantize import calibration
from headrace.quantize.calibration import read_texts, samples
from helpers.tiny import BOS, save_t0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_checkpoint(str(save_t0(tmp_path_factory.mktemp("t0")))).tokenizer()


def test_kinds_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain\n\ntext")
    lines = [
        {"text": "one"},
        "two",
        {"messages": [{"role": "user", "content": "three"}, {"role": "assistant", "content": "four"}]},
        {"conversations": [{"from": "human", "value": "five"}]},
    ]
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    (tmp_path / "c.json").write_text(json.dumps(lines[:2]))
    (tmp_path / "d.bin").write_bytes(b"\xff")
    expected = ["one", "two", "three\n\nfour", "five"]
    assert read_texts(str(tmp_path / "b.jsonl")) == expected
    assert read_texts(str(tmp_path)) == ["plain\n\ntext", *expected, "one", "two"]
    with gzip.open(tmp_path / "e.jsonl.gz", "wt") as file:
        file.write("\n".join(json.dumps(line) for line in lines))
    assert read_texts(str(tmp_path / "e.jsonl.gz")) == expected


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.jsonl", b'{"text": "a"}\n{"text"', "line 2: is not valid JSON"),
        ("x.json", b"[1, 2", "is not valid JSON"),
        ("x.jsonl", b'{"other": 1}', "line 1: must be a string, or an object"),
        ("x.txt", b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_faulty_files(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_texts(str(tmp_path / name))


def test_a_directory_without_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no files"):
        read_texts(str(tmp_path))


def test_samples_are_pieces_chosen_by_the_seed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = "".join(chr(33 + i % 90) for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    first, again, other = (
        samples(tokenizer, str(tmp_path / "a.txt"), count=5, length=50, seed=seed, max_length=512) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert all(bytes(piece) in text.encode() for piece in first)
    assert {len(piece) for piece in first} == {50}
    assert len({bytes(piece) for piece in first}) == 5


def test_each_sample_begins_like_a_text(tmp_path: Path) -> None:
    path = save_t0(tmp_path / "m")
    settings = json.loads((path / "tokenizer_config.json").read_text()) | {"add_bos_token": True}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "a.txt").write_text("x" * 400)
    tokenizer = open_checkpoint(str(path)).tokenizer()
    for piece in samples(tokenizer, str(tmp_path / "a.txt"), count=4, length=100, seed=0, max_length=512):
        assert piece == [BOS] + [120] * 99


def test_too_little_text_and_too_long_pieces(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "a.txt"
    file.write_text("x" * 250)

    def take(count: int, length: int) -> None:
        samples(tokenizer, str(file), count=count, length=length, seed=0, max_length=512)

    take(2, 100)
    with pytest.raises(ConfigError, match=r"has 250 tokens, and 3 samples of 100 take 300: .* at most 2 samples"):
        take(3, 100)
    with pytest.raises(ConfigError, match="has 250 tokens, and 1 samples of 300 take 300: give more text"):
        take(1, 300)
    with pytest.raises(ConfigError, match="more than the 512 tokens that the model takes"):
        take(1, 513)
    file.write_text("  \n")
    with pytest.raises(ConfigError, match="has 0 tokens"):
        take(1, 1)


def test_datasets_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fetched, with a hub that is a folder."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("wikitext-2-raw/wiki.train.raw", " = Water mills = \n")
    (tmp_path / "wikitext-2-raw-v1.zip").write_bytes(archive.getvalue())
    (tmp_path / "c4.json.gz").write_bytes(gzip.compress(b'{"text": "one"}\n{"text": "two"}\n'))

    def download(repo: str, file: str, repo_type: str) -> str:
        assert repo_type == "dataset"
        return str(tmp_path / ("c4.json.gz" if repo == "allenai/c4" else file))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert read_texts("wikitext2") == [" = Water mills = \n"]
    assert read_texts("c4") == ["one", "two"]
    (tmp_path / "wikitext-2-raw-v1.zip").write_bytes(b"no archive")
    with pytest.raises(ModelError, match="is damaged"):
        read_texts("wikitext2")


def test_without_a_hub() -> None:
    with pytest.raises(ModelError, match=r"dataset wikitext2 cannot be fetched .* name a local file"):
        read_texts("wikitext2")
    with pytest.raises(ConfigError, match="is no file or directory, nor one of wikitext2, c4, sharegpt"):
        read_texts("pile")


def test_no_more_is_read_than_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "MAX_CHARACTERS", 10)
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 7)
    assert read_texts(str(tmp_path)) == ["aaaaaaa", "bbb"]
