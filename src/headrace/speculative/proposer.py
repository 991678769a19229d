"""What makes drafts: the interface that all proposers have."""

from array import array
from dataclasses import dataclass
from typing import Protocol

from headrace.sampling.params import SampleRequest


@dataclass(slots=True)
class DraftRequest:
    """A sequence that wants a draft of its next tokens.

    token_ids: all it has, prompt and output. They stay the scheduler's, are not to be changed, and only ever grow.
    most: how long the draft may be, at least 1.
    block_tables: as SequenceStep has them, with room for the draft.
    sample: how the sequence's next token will be drawn.
    scope: whose sequence it is. What those of another scope say must not come into its draft.
    stop_ids: tokens that end the sequence: a draft goes on to the first of them at most.
    has_grammar: whether the draft will be cut where it does not fit a grammar.
    """

    seq_id: int
    token_ids: list[int]
    most: int
    block_tables: "list[array[int]]"
    sample: SampleRequest
    scope: str = ""
    stop_ids: tuple[int, ...] = ()
    has_grammar: bool = False


class Proposer(Protocol):
    """Guesses how sequences go on. A guess may be as wrong as it likes: it costs time, and never changes an output."""

    def propose(self, requests: list[DraftRequest]) -> list[list[int]]:
        """For each sequence the tokens that it may say next; none where there is nothing to go by."""

    def forget(self, seq_id: int) -> None:
        """The sequence has ended."""
