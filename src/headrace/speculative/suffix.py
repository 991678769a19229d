"""Drafts by looking up the longest end of the sequence that stood before: in itself, or in others of its kind."""

from array import array
from collections import OrderedDict

from headrace.speculative.ngram import TOKEN_BYTES, following, last_place
from headrace.speculative.proposer import DraftRequest

LONGEST = 64  # ends of more tokens are not told apart
MAX_SCOPES = 64
MAX_REMEMBERED = 2**16  # tokens of one scope
NO_TOKEN = array("i", [-1]).tobytes()  # between two texts


class SuffixProposer:
    """Suffix decoding (Oliaro et al. 2024, https://arxiv.org/abs/2411.04975), by search instead of a tree.

    What followed the longest end that stands further to the front, or in the sequences of the same scope that have
    ended last. The longer that end is, the longer is the draft: twice as long at most. A shorter end is found wherever
    a longer one is, so that the longest takes a handful of searches, which run at the speed of memory.

    shortest: tokens that an end must have.
    """

    def __init__(self, shortest: int) -> None:
        self.shortest = shortest
        self._texts: dict[int, tuple[bytearray, str]] = {}  # by sequence, its tokens as bytes, and its scope
        self._ended: OrderedDict[str, bytearray] = OrderedDict()  # by scope, the one used last at the end

    def propose(self, requests: list[DraftRequest]) -> list[list[int]]:
        return [self._continuation(request) for request in requests]

    def forget(self, seq_id: int) -> None:
        text, scope = self._texts.pop(seq_id, (bytearray(), ""))
        if text:
            known = self._ended.setdefault(scope, bytearray())
            known += NO_TOKEN + text
            del known[: max(0, len(known) - MAX_REMEMBERED * TOKEN_BYTES)]
            self._ended.move_to_end(scope)
            if len(self._ended) > MAX_SCOPES:
                self._ended.popitem(last=False)

    def _continuation(self, request: DraftRequest) -> list[int]:
        text, _ = self._texts.setdefault(request.seq_id, (bytearray(), request.scope))
        text += array("i", request.token_ids[len(text) // TOKEN_BYTES :]).tobytes()
        others = self._ended.get(request.scope, bytearray())
        own, place = self._longest_end(text, text)
        theirs, there = self._longest_end(text, others)
        if theirs > own:
            start = (there + theirs) * TOKEN_BYTES
            found = array("i", bytes(others[start : start + min(request.most, 2 * theirs) * TOKEN_BYTES])).tolist()
            return found[: found.index(-1)] if -1 in found else found
        return following(request.token_ids, place + own, min(request.most, 2 * own)) if own else []

    def _longest_end(self, text: bytearray, searched: bytearray) -> tuple[int, int]:
        """The length of the longest end of `text` that stands in `searched` with something after it, and where; in
        tokens, and 0 if there is none of the shortest length."""
        most = min(LONGEST, len(text) // TOKEN_BYTES - (searched is text))
        found, place = 0, 0
        low, high, step = self.shortest, most, 1
        while low <= high:  # first with ever greater steps, then between the last two
            length = min(high, low + step - 1)
            at = last_place(searched, bytes(text[-length * TOKEN_BYTES :]))
            if at is None:
                high, step = length - 1, max(1, step // 4)
            else:
                found, place = length, at
                low, step = length + 1, 2 * step
        return found, place
