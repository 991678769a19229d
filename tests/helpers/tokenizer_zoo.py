"""Tokenizers of the kinds that models have, trained in a moment and written as Hugging Face directories."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from helpers.awkward import CODE, EMOJI, SCRIPTS, WORDS

CORPUS = [
    *CODE, *EMOJI, *SCRIPTS, *WORDS,
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "A headrace is the channel that brings water to a mill wheel at a steady, full flow.",
    "im_start im_end user assistant system tool end start | < > pad",
] * 4  # fmt: skip
SPECIAL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
SETTINGS: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "clean_up_tokenization_spaces": False,
}


def _special(**flags: bool) -> list[AddedToken]:
    return [AddedToken(token, special=True, **({"normalized": False} | flags)) for token in SPECIAL]


def byte_level() -> Tokenizer:
    """As Llama 3 and Qwen: a pattern of their own, then bytes; with a beginning-of-sequence token."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_special())
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("</tool>", normalized=False)])
    bos = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), bos])
    return tokenizer


def gpt2() -> Tokenizer:
    """As GPT-2 and SmolLM2: no normalizer and nothing added; special tokens that are looked for in normalized text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_special(normalized=True))
    return tokenizer


def _byte_fallback_bpe() -> models.BPE:
    """A vocabulary of words that begin with ▁ for the space before them, with bytes for what it lacks."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained.train_from_iterator(CORPUS[:60], trainers.BpeTrainer(vocab_size=600, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\n"]
    tokens += [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    merges = [tuple(merge) for merge in model["merges"]]
    return models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def _add_llama_tokens(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True, normalized=False), *_special()])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )


def llama2() -> Tokenizer:
    """As Llama 2: SentencePiece's way as a normalizer, which puts ▁ before each text between special tokens."""
    tokenizer = Tokenizer(_byte_fallback_bpe())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _add_llama_tokens(tokenizer)
    return tokenizer


def metaspace_first() -> Tokenizer:
    """As newer Llama 2 conversions: ▁ is put only before the very first word."""
    tokenizer = Tokenizer(_byte_fallback_bpe())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _add_llama_tokens(tokenizer)
    return tokenizer


def gemma() -> Tokenizer:
    """As Gemma: spaces become ▁, nothing is put in front, and some added tokens are made of white space."""
    tokenizer = Tokenizer(_byte_fallback_bpe())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    _add_llama_tokens(tokenizer)
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("▁▁", normalized=False)])
    return tokenizer


def unigram() -> Tokenizer:
    """As T5's descendants: a unigram model, NFKC and lower case, so that special tokens match in lower case too."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(vocab_size=500, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False),
    )
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(_special(normalized=True))
    return tokenizer


ZOO: dict[str, Callable[[], Tokenizer]] = {
    maker.__name__: maker for maker in (byte_level, gpt2, llama2, metaspace_first, gemma, unigram)
}


def save(directory: Path, tokenizer: Tokenizer, **settings: Any) -> Path:
    """tokenizer.json and tokenizer_config.json; `settings` are added to the latter, and None takes a key away."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    merged = {key: value for key, value in (SETTINGS | settings).items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(merged))
    return directory
