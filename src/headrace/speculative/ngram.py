"""Drafts by looking up: what followed when the sequence's last few tokens stood in it before."""

from array import array

from headrace.speculative.proposer import DraftRequest

TOKEN_BYTES = array("i").itemsize


class NgramProposer:
    """Prompt lookup (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding), over prompt and output.

    The last `longest` tokens are looked for, then fewer, down to `shortest`; of several places the last one counts.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self.longest, self.shortest = longest, shortest
        self._texts: dict[int, bytearray] = {}  # by sequence, its tokens as bytes, which are searched in no time

    def propose(self, requests: list[DraftRequest]) -> list[list[int]]:
        return [self._continuation(request) for request in requests]

    def forget(self, seq_id: int) -> None:
        self._texts.pop(seq_id, None)

    def _continuation(self, request: DraftRequest) -> list[int]:
        tokens = request.token_ids
        text = self._texts.setdefault(request.seq_id, bytearray())
        text += array("i", tokens[len(text) // TOKEN_BYTES :]).tobytes()
        for length in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            place = last_place(text, bytes(text[-length * TOKEN_BYTES :]))
            if place is not None:
                return following(tokens, place + length, request.most)
        return []


def following(tokens: list[int], place: int, count: int) -> list[int]:
    """The tokens from a place on; where they end, they go on as they did before, as in LZ77."""
    found = tokens[place : place + count]
    while len(found) < count:
        found += found[: count - len(found)]
    return found


def last_place(text: bytearray, pattern: bytes) -> int | None:
    """Where some tokens stand in a text for the last time before its end, counted in tokens."""
    end = len(text) - TOKEN_BYTES
    while (place := text.rfind(pattern, 0, end)) >= 0:
        if place % TOKEN_BYTES == 0:
            return place // TOKEN_BYTES
        end = place + len(pattern) - 1  # found across the borders of tokens
    return None
