"""The tokenizer inside a GGUF file, as one of the `tokenizers` library.

`tokenizer.ggml.model` names the kind: "gpt2" is byte-level BPE with merges in the file, and "llama" is SentencePiece's
BPE, with a score per token instead of merges. What the file only names or leaves out - how text is split before
merging, whether a space goes in front - follows the tokenizers that the names come from, as llama.cpp does.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from headrace.errors import ModelError
from headrace.formats.files import quoted
from headrace.formats.gguf import GGUFFile
from headrace.formats.tokenizer import library_faults

logger = logging.getLogger(__name__)

PREFIX = "tokenizer.ggml."
SPACE = "\u2581"  # how SentencePiece writes a space

# Token types
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Characters in one normal token and in all of them; Gemma's longest has 16, and all have 1.4 million.
MAX_PIECE_LENGTH = 1024
MAX_PIECES_LENGTH = 1 << 24

# Control tokens that end an answer though a file may not say so; llama.cpp goes by these texts as well.
END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
    }
)


@dataclass(frozen=True)
class PreTokenizer:
    """How a byte-level BPE splits text before merging.

    pattern: a regular expression for the pieces; None is GPT-2's.
    single_digits: every digit is a piece of its own.
    whole_words: a piece that is in the vocabulary is taken whole, whatever the merges say.
    add_bos: whether to begin with the BOS token when the file says nothing of it.
    nfc: compose characters first (Unicode normalization form C).
    """

    pattern: str | None = None
    single_digits: bool = False
    whole_words: bool = False
    add_bos: bool = False
    nfc: bool = False


# Llama 3 takes up to three digits at a time, Qwen 2 one; else their patterns are the same.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = PreTokenizer(pattern=_PATTERN.replace("DIGITS", r"\p{N}{1,3}"), whole_words=True, add_bos=True)

PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smollm": PreTokenizer(single_digits=True),
    "qwen2": PreTokenizer(pattern=_PATTERN.replace("DIGITS", r"\p{N}"), nfc=True),
}


class GGUFVocabulary:
    """The tokens of a file.

    tokens: their texts, by id.
    types: their types, by id.
    special_ids: ids that the metadata names, such as {"bos": 1, "eos": 2}.
    The constructor and the methods raise ModelError for a file without tokens, or with faulty ones.
    """

    def __init__(self, file: GGUFFile) -> None:
        tokens = file.strings(PREFIX + "tokens")
        if not tokens:
            file.fault(f"has no tokenizer: {PREFIX}tokens is missing or empty")
        self.file = file
        self.tokens = tokens
        self.types = self._per_token("token_type", NORMAL)
        names = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding"}
        ids = {name: self._special_id(f"{PREFIX}{key}_token_id") for name, key in names.items()}
        self.special_ids = {name: token for name, token in ids.items() if token is not None}

    def end_ids(self) -> list[int]:
        """The tokens that end an answer: first those that the metadata names, then those known by their text."""
        named = [self.special_ids[name] for name in ("eos", "eot", "eom") if name in self.special_ids]
        known = [int(i) for i in np.flatnonzero(self.types == CONTROL) if self.tokens[i] in END_TEXTS]
        return list(dict.fromkeys(named + known))

    def special_tokens(self) -> dict[str, str]:
        """Texts of the special tokens under the names that chat templates know, such as `bos_token`."""
        names = ("bos", "eos", "unk", "pad")
        return {f"{name}_token": self.tokens[self.special_ids[name]] for name in names if name in self.special_ids}

    def ids(self) -> dict[str, int]:
        """The tokens' ids by their texts, for those that have one."""
        ids = {text: token for token, text in enumerate(self.tokens)}
        for token, text in enumerate(self.tokens) if len(ids) < len(self.tokens) else ():
            if text and ids[text] != token:
                self.file.fault(f"{PREFIX}tokens has {quoted(text)} twice, as token {token} and as token {ids[text]}")
        ids.pop("", None)  # holes in the vocabulary
        return ids

    def scores(self) -> NDArray[Any]:
        scores = self._per_token("scores", None).astype(np.float32)
        if np.isnan(scores).any():
            self.file.fault(f"{PREFIX}scores has values that are not numbers")
        return scores

    def _per_token(self, key: str, default: int | None) -> NDArray[Any]:
        values = self.file.numbers(PREFIX + key)
        if values is None and default is not None:
            return np.full(len(self.tokens), default)
        if values is None or len(values) != len(self.tokens):
            count = 0 if values is None else len(values)
            self.file.fault(f"{PREFIX}{key} must have a value for each of the {len(self.tokens)} tokens, not {count}")
        return values

    def _special_id(self, key: str) -> int | None:
        token = self.file.value(key, int)
        if token is not None and not 0 <= token < len(self.tokens):
            # As files say -1 for "none", in one size of integer or another.
            logger.warning("%s: ignoring %s, as the vocabulary has no token %d", self.file.path, key, token)
            return None
        return token


def build_tokenizer(vocabulary: GGUFVocabulary) -> tokenizers.Tokenizer:
    """The tokenizer of a file. Raises ModelError if it is faulty or not supported."""
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    kind = vocabulary.file.required(PREFIX + "model", str)
    if kind not in builders:
        vocabulary.file.fault(f"has a tokenizer of the kind {quoted(kind)}; supported are {', '.join(builders)}")
    tokenizer, add_bos = builders[kind](vocabulary)
    _add_marked_tokens(tokenizer, vocabulary)
    _add_ends(tokenizer, vocabulary, add_bos)
    return tokenizer


def _byte_level(vocabulary: GGUFVocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE, and whether it begins with BOS by default."""
    file = vocabulary.file
    name = file.value(PREFIX + "pre", str)
    if name in (None, "default"):
        logger.warning("%s: does not name a pre-tokenizer (%spre); taking that of GPT-2", file.path, PREFIX)
        name = "gpt-2"
    if name not in PRE_TOKENIZERS:
        file.fault(f"names the unknown pre-tokenizer {quoted(name)}; known are {', '.join(PRE_TOKENIZERS)}")
    pre = PRE_TOKENIZERS[name]

    merges = [merge.partition(" ")[::2] for merge in file.strings(PREFIX + "merges") or []]
    tokenizer = _bpe(vocabulary, merges, ignore_merges=pre.whole_words)
    split: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None)
    ]
    if pre.pattern is not None:
        split.insert(0, pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    if pre.single_digits:
        split.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _sentencepiece(vocabulary: GGUFVocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece's BPE over whole texts, with bytes for characters that it has no token for; it begins with BOS."""
    unknown = vocabulary.special_ids.get("unk", next(iter(np.flatnonzero(vocabulary.types == UNKNOWN)), None))
    bytes_known = np.count_nonzero(vocabulary.types == BYTE)
    if unknown is None and bytes_known < 256:
        vocabulary.file.fault(
            f"the tokenizer has {bytes_known} of 256 byte tokens, and no unknown token for the others"
        )
    tokenizer = _bpe(
        vocabulary,
        _merges(vocabulary),
        byte_fallback=bytes_known > 0,
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
    )
    add_space = vocabulary.file.value(PREFIX + "add_space_prefix", bool)
    spaces = normalizers.Replace(" ", SPACE)
    decode = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space is False:
        tokenizer.normalizer = spaces
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        decode.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(decode)
    return tokenizer, True


def _merges(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    """The merges that make a BPE by scores: every way to put a token together from two others, best token first.

    SentencePiece joins the two neighbours whose union has the highest score. Of the ways to put a token together just
    one is ever used - the last step in which its own text is merged - so their order among each other does not matter.
    Only normal tokens take part: all others are found in the text before merging starts, or never.
    """
    normal = np.flatnonzero(vocabulary.types == NORMAL)
    best_first = normal[np.argsort(-vocabulary.scores()[normal], kind="stable")].tolist()
    texts = [vocabulary.tokens[token] for token in best_first]
    if max(map(len, texts), default=0) > MAX_PIECE_LENGTH or sum(map(len, texts)) > MAX_PIECES_LENGTH:
        vocabulary.file.fault(f"{PREFIX}tokens are implausibly long")
    known = frozenset(texts)
    return [
        (left, right)
        for text in texts
        for end in range(1, len(text))
        if (left := text[:end]) in known and (right := text[end:]) in known
    ]


def _bpe(vocabulary: GGUFVocabulary, merges: Sequence[tuple[str, str]], **settings: Any) -> tokenizers.Tokenizer:
    ids = vocabulary.ids()
    with library_faults(_misfit(vocabulary)):
        return tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges, **settings))


def _misfit(vocabulary: GGUFVocabulary) -> Callable[[str], ModelError]:
    path = vocabulary.file.path
    return lambda fault: ModelError(f"{path}: the tokenizer's tokens and merges do not fit together: {fault}")


def _add_marked_tokens(tokenizer: tokenizers.Tokenizer, vocabulary: GGUFVocabulary) -> None:
    """Lets control tokens be special, and those that the model's makers defined be found in the text as a whole."""

    def add(types: tuple[int, ...], special: bool, normalized: bool) -> None:
        texts = [vocabulary.tokens[token] for token in np.flatnonzero(np.isin(vocabulary.types, types))]
        with library_faults(_misfit(vocabulary)):
            tokenizer.add_tokens([AddedToken(text, special=special, normalized=normalized) for text in texts if text])

    add((UNKNOWN, CONTROL), special=True, normalized=False)
    # SentencePiece looks for defined tokens where spaces are marks already, and takes a mark in the text for a space.
    # Not so where normalizing puts a mark in front as well, since the library would put it before the tokens too.
    add((USER_DEFINED,), special=False, normalized=isinstance(tokenizer.normalizer, normalizers.Replace))


def _add_ends(tokenizer: tokenizers.Tokenizer, vocabulary: GGUFVocabulary, add_bos: bool) -> None:
    """Puts BOS before an encoded text and EOS after it, as the file wants it."""
    wanted = {}
    for name, default in (("bos", add_bos), ("eos", False)):
        told = vocabulary.file.value(f"{PREFIX}add_{name}_token", bool)
        wanted[name] = (default if told is None else told) and name in vocabulary.special_ids
    ends = [name for name in wanted if wanted[name]]
    if not ends:
        return
    single = [name for name in ("bos", "$A", "eos") if name == "$A" or name in ends]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        special_tokens=[
            {
                "id": name,
                "ids": [vocabulary.special_ids[name]],
                "tokens": [vocabulary.tokens[vocabulary.special_ids[name]]],
            }
            for name in ends
        ],
    )
