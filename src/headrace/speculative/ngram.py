"""Drafts by looking up: what followed when the sequence's last few tokens stood in it before."""

from array import array

from headrace.speculative.proposer import DraftRequest

TOKEN_BYTES = array("i").itemsize


class NgramProposer:
    """Prompt lookup (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding), over prompt and output.

    The last `longest` tokens are looked for, then fewer, down to `shortest`; of several places the last one counts. A
    text that has come round to its own end goes on as it did before, as in LZ77.
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
            place = _last_place(text, length)
            if place is not None:
                draft = tokens[place + length : place + length + request.most]
                while len(draft) < request.most:
                    draft += draft[: request.most - len(draft)]
                return draft
        return []


def _last_place(text: bytearray, length: int) -> int | None:
    """Where the last `length` tokens of a text stand in it for the last time before its end, counted in tokens."""
    pattern = text[-length * TOKEN_BYTES :]
    end = len(text) - TOKEN_BYTES
    while (place := text.rfind(pattern, 0, end)) >= 0:
        if place % TOKEN_BYTES == 0:
            return place // TOKEN_BYTES
        end = place + len(pattern) - 1  # found across the borders of tokens
    return None
