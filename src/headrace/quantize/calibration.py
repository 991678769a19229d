"""Calibration text: from files, directories or the hub to pieces of tokens."""

import gzip
import io
import json
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, ModelError
from headrace.formats.files import reason
from headrace.formats.tokenizer import Tokenizer

MAX_CHARACTERS = 64 * 2**20  # of a dataset are read; that is far more than calibration needs
ENDINGS = (".txt", ".md", ".raw", ".jsonl", ".json")

# Datasets on the hub: repository, file, and for an archive the file within.
HUB = {
    "wikitext2": ("ggml-org/ci", "wikitext-2-raw-v1.zip", "wikitext-2-raw/wiki.train.raw"),
    "c4": ("allenai/c4", "en/c4-train.00000-of-01024.json.gz", None),
    "sharegpt": (
        "anon8231489123/ShareGPT_Vicuna_unfiltered",
        "ShareGPT_V3_unfiltered_cleaned_split.json",
        None,
    ),
}


def samples(
    tokenizer: Tokenizer, dataset: str, *, count: int, length: int, seed: int, max_length: int
) -> list[list[int]]:
    """`count` pieces of `length` tokens each, chosen from all of the dataset's with this seed.

    Each begins as the tokenizer begins a text (such as with a beginning-of-sequence token), since attention leans on
    that. Raises ConfigError where there is too little text, saying how much is needed, and for a length beyond what
    the model takes.
    """
    if length > max_length:
        raise ConfigError(f"seq_len {length} is more than the {max_length} tokens that the model takes")
    beginning = tokenizer.encode("")
    fresh = length - len(beginning)
    if fresh < 1:
        raise ConfigError(f"seq_len must be above {len(beginning)}: so many tokens begin each text")
    texts = [text for text in read_texts(dataset) if text.strip()]
    stream = [token for ids in tokenizer.encode_batch(texts, add_special_tokens=False) for token in ids]
    pieces = len(stream) // fresh
    if pieces < count:
        advice = f", or at most {pieces} samples" if pieces else ""
        raise ConfigError(
            f"{dataset} has {len(stream)} tokens, and {count} samples of {length} take {count * fresh}: "
            f"give more text{advice}"
        )
    chosen = random.Random(seed).sample(range(pieces), count)
    return [beginning + stream[i * fresh : (i + 1) * fresh] for i in chosen]


def read_texts(dataset: str) -> list[str]:
    """The documents of a dataset: a name in HUB, or a path. Raises ConfigError or ModelError, naming what is wrong."""
    path = Path(dataset).expanduser()
    if not path.exists():
        if dataset not in HUB:
            raise ConfigError(f"dataset {dataset}: is no file or directory, nor one of {', '.join(HUB)}")
        return list(_within_limit(_from_hub(dataset)))
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in ENDINGS)
        if not files:
            raise ConfigError(f"dataset {path}: has no files that end in {', '.join(ENDINGS)}")
    return list(_within_limit(text for file in files for text in _documents(file)))


def _within_limit(texts: Iterator[str]) -> Iterator[str]:
    left = MAX_CHARACTERS
    for text in texts:
        if left <= 0:
            return
        yield text[:left]
        left -= len(text)


def _documents(path: Path) -> Iterator[str]:
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8") as unpacked:
                yield from _read(unpacked, path.with_suffix("").suffix, path)
        else:
            with path.open(encoding="utf-8") as file:
                yield from _read(file, path.suffix, path)
    except UnicodeDecodeError:
        raise ConfigError(f"dataset {path}: is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"dataset {path}: cannot be read: {reason(error)}") from None


def _read(file: Any, kind: str, path: Path) -> Iterator[str]:
    """Plain text is one document. JSON is a list of entries, or has one on each line."""
    if kind not in (".json", ".jsonl"):
        yield file.read(MAX_CHARACTERS)
        return
    start = file.read(1)
    while start.isspace():
        start = file.read(1)
    if start == "[":
        try:
            entries = json.loads(start + file.read())
        except ValueError as error:
            raise ConfigError(f"dataset {path}: is not valid JSON: {error}") from None
        for number, entry in enumerate(entries, 1):
            yield _text_of(entry, f"{path}, entry {number}")
        return
    for number, line in enumerate(file, 1):
        line = start + line if number == 1 else line
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"dataset {path}, line {number}: is not valid JSON: {error}") from None
        yield _text_of(entry, f"{path}, line {number}")


def _text_of(entry: Any, place: str) -> str:
    """The text of an entry: a string, or an object with text, content or prompt, or with messages (also ShareGPT's)."""
    if isinstance(entry, str):
        return entry
    if isinstance(entry, dict):
        for key in ("text", "content", "prompt"):
            if isinstance(entry.get(key), str):
                return str(entry[key])
        for key in ("messages", "conversations", "conversation"):
            turns = entry.get(key)
            if isinstance(turns, list):
                texts = [turn.get("content", turn.get("value")) for turn in turns if isinstance(turn, dict)]
                return "\n\n".join(text for text in texts if isinstance(text, str))
    raise ConfigError(f"dataset {place}: must be a string, or an object with text, content, prompt or messages")


def _from_hub(name: str) -> Iterator[str]:
    from huggingface_hub import hf_hub_download

    repo, file, member = HUB[name]
    try:
        path = Path(hf_hub_download(repo, file, repo_type="dataset"))
    except Exception as error:  # the library's own errors, and those of the HTTP library beneath it
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"dataset {name} cannot be fetched from the hub ({repo}): {first}; name a local file or directory instead"
        ) from None
    if member is None:
        yield from _documents(path)
        return
    try:
        with zipfile.ZipFile(path) as archive, archive.open(member) as raw:
            yield io.TextIOWrapper(raw, encoding="utf-8").read(MAX_CHARACTERS)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{path}: is damaged: {error}") from None
