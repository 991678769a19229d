"""One token stream of a request, as the scheduler sees it."""

from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
from typing import TYPE_CHECKING

from headrace.kvcache.manager import BlockTable
from headrace.sampling.history import History
from headrace.sampling.params import SampleRequest, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from headrace.structured.constraint import Constraint


class Status(Enum):
    """HELD: waits for the first sequence of its request to compute their prompt. GONE: finished, aborted or expired."""

    HELD = "held"
    WAITING = "waiting"
    RUNNING = "running"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and what has been generated after it.

    seq_id: unique, and in order of arrival.
    token_ids: the prompt's tokens, then the generated ones.
    max_length: it ends when it has so many tokens.
    stop_ids: tokens that end it, which are not drawn before `min_tokens`.
    priority: its class; lower ones go first. tenant: who pays for it in a fair policy. salt: see PrefixIndex.
    queue_deadline, deadline: moments of the scheduler's clock by which it must have begun and have finished.
    siblings: the other sequences of its request, which wait for it to compute the prompt.
    leader: the sequence from which it is forked, until it has been admitted for the first time.
    arrival, begun: when it was queued, and when it was first admitted.
    rank: its place in the policy's order; the lowest goes first and gives way last.
    num_computed: how many of its tokens have keys and values in the cache. All of them but the last, once it decodes;
        none after a preemption by recompute.
    num_cached: how many tokens of its prompt were in the cache when it was first admitted; None before that.
    constraint: where it stands in its grammar, if it has one.
    history: its tokens as penalties need them, where it has any.
    prompt_logprobs: what has been reported of the prompt so far, where asked for; None for the first token.
    """

    seq_id: int
    index: int
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    max_length: int
    stop_ids: tuple[int, ...] = ()
    priority: int = 0
    tenant: str = ""
    salt: str = ""
    queue_deadline: float | None = None
    deadline: float | None = None
    siblings: list["Sequence"] = field(default_factory=list)
    leader: "Sequence | None" = None
    status: Status = Status.HELD
    arrival: float = 0.0
    begun: float = 0.0
    rank: tuple[float, int] = (0.0, 0)
    table: BlockTable = field(default_factory=BlockTable)
    num_computed: int = 0
    num_cached: int | None = None
    constraint: "Constraint | None" = None
    history: History | None = None
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_to_compute(self) -> int:
        """Tokens that are not in the cache yet: one when it decodes, more when there is prompt left."""
        return len(self.token_ids) - self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt

    def sample_requests(self, draft: list[int] | None = None, *, masked: bool = True) -> list[SampleRequest]:
        """How to draw its next token, and the one after each token of a draft, if that is accepted.

        masked: with what the grammar allows, if there is one; its masks are computed once for each step.
        """
        params, position, history, constraint = self.params, len(self.token_ids), self.history, self.constraint
        # Its stop tokens are forbidden before this position.
        minimum = self.num_prompt + params.min_tokens
        if not draft and history is None and constraint is None:  # nearly always, and for every sequence in every step
            return [SampleRequest(params, self.seed, self.index, position, self.stop_ids if position < minimum else ())]
        draft = draft or []
        if history is not None:
            history.update(self.token_ids)
        masks = constraint.masks(draft) if constraint is not None and masked else None
        requests = []
        for count in range(len(draft) + 1):
            if count and history is not None:
                history = history.followed_by(draft[count - 1])
            forbidden = self.stop_ids if position + count < minimum else ()
            mask = None if masks is None else masks[count]
            requests.append(SampleRequest(params, self.seed, self.index, position + count, forbidden, history, mask))
        return requests

    def sensible(self, draft: list[int]) -> list[int]:
        """The beginning of a draft that can be right: it goes neither against the grammar nor past the end."""
        if self.constraint is not None:
            draft = self.constraint.allowed(draft)
        return list(takewhile(lambda token: token not in self.stop_ids, draft))
