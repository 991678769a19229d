"""What a sequence has said so far, as penalties and forbidden words need it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class History:
    """The tokens of a sequence, counted as they come.

    num_prompt: how many of them are the prompt's.
    bad_words: token sequences that the output may not hold, none empty.
    breakers: tokens across which no repetition reaches.
    counts_prompt: whether `seen` knows the prompt's tokens too.
    """

    num_prompt: int
    bad_words: tuple[tuple[int, ...], ...] = ()
    breakers: frozenset[int] = frozenset()
    counts_prompt: bool = False
    _tokens: "array[int]" = field(default_factory=lambda: array("q"))
    _places: dict[int, int] = field(default_factory=dict)
    _ids: "array[int]" = field(default_factory=lambda: array("q"))
    _counts: "array[int]" = field(default_factory=lambda: array("q"))

    def update(self, token_ids: Sequence[int]) -> None:
        """Takes the sequence's tokens, prompt and output; it only ever grows, so that most are known already."""
        for position in range(len(self._tokens), len(token_ids)):
            self._append(token_ids[position])

    def followed_by(self, token_id: int) -> "History":
        """The history as it would be with one token more. This one stays as it is."""
        longer = History(
            self.num_prompt,
            self.bad_words,
            self.breakers,
            self.counts_prompt,
            self._tokens[:],
            self._places.copy(),
            self._ids[:],
            self._counts[:],
        )
        longer._append(token_id)
        return longer

    def _append(self, token: int) -> None:
        is_output = len(self._tokens) >= self.num_prompt
        self._tokens.append(token)
        if not is_output and not self.counts_prompt:
            return
        place = self._places.setdefault(token, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token)
            self._counts.append(0)
        self._counts[place] += is_output

    @property
    def seen(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The different tokens so far, and how often the output holds each; 0 for those of the prompt alone."""
        return np.array(self._ids, np.int64), np.array(self._counts, np.int64)

    def forbidden(self) -> list[int]:
        """The tokens that would complete a bad word."""
        longest = max(map(len, self.bad_words), default=0)
        output = self._tokens[max(self.num_prompt, len(self._tokens) - longest) :]
        return [w[-1] for w in self.bad_words if len(w) == 1 or output[1 - len(w) :] == array("q", w[:-1])]

    def repetitions(self, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The tokens that would lengthen a repetition, and the length of the longest one that each would lengthen.

        A repetition is an end of the sequence that stands further to the front as well, followed there by the token. It
        does not reach across a breaker, and counts up to `most` tokens. Source of the rule:
        https://github.com/oobabooga/text-generation-webui/pull/5677
        """
        tokens = np.array(self._tokens, np.int64)
        if len(tokens) < 2 or self._tokens[-1] in self.breakers:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        places = np.flatnonzero(tokens[:-1] == tokens[-1])
        places = places[~np.isin(tokens[places + 1], list(self.breakers))]
        followers, lengths = tokens[places + 1], np.ones(len(places), np.int64)
        going_on = np.arange(len(places))
        for length in range(1, min(most, len(tokens) - 1)):
            before = self._tokens[-1 - length]
            going_on = going_on[places[going_on] >= length]
            going_on = going_on[tokens[places[going_on] - length] == before]
            if not len(going_on) or before in self.breakers:
                break
            lengths[going_on] = length + 1
        ids, which = np.unique(followers, return_inverse=True)
        longest = np.zeros(len(ids), np.int64)
        np.maximum.at(longest, which, lengths)
        return ids, longest
