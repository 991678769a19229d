"""Words that a request gives as text, as the tokens that sampling knows."""

from functools import lru_cache

from headrace.formats.tokenizer import Tokenizer
from headrace.sampling.history import History
from headrace.sampling.params import DRY_SEQUENCE_BREAKERS, SamplingParams


def history_of(params: SamplingParams, tokenizer: Tokenizer, num_prompt: int) -> History:
    """An empty history for a sequence of a request with penalties."""
    breakers = DRY_SEQUENCE_BREAKERS if params.dry_sequence_breakers is None else params.dry_sequence_breakers
    return History(
        num_prompt,
        bad_words=_bad_words(tokenizer, tuple(params.bad_words or ())),
        breakers=_breakers(tokenizer, tuple(breakers)) if params.dry_multiplier else frozenset(),
        counts_prompt=params.repetition_penalty != 1,
    )


@lru_cache(maxsize=64)
def _bad_words(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Each word as it is tokenized by itself, and after a space."""
    sequences = [tuple(tokenizer.encode(text, False)) for word in words for text in (word, " " + word.lstrip())]
    return tuple(dict.fromkeys(sequence for sequence in sequences if sequence))


@lru_cache(maxsize=64)
def _breakers(tokenizer: Tokenizer, strings: tuple[str, ...]) -> frozenset[int]:
    """The last token of each string, tokenized after a letter: at the beginning of a text it may be another."""
    return frozenset(tokenizer.encode("a" + string, False)[-1] for string in strings)
