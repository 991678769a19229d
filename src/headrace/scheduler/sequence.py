"""One token stream of a request, as the scheduler sees it."""

from dataclasses import dataclass, field

from headrace.sampling.params import SampleRequest, SamplingParams, TokenLogprob


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and what has been generated after it.

    seq_id: unique, and in order of arrival.
    token_ids: the prompt's tokens, then the generated ones.
    max_length: it ends when it has so many tokens.
    stop_ids: tokens that end it, which are not drawn before `min_tokens`.
    num_computed: how many of its tokens have keys and values in the cache. All of them but the last, once it decodes;
        none after a preemption.
    block_table: its cache blocks, in order.
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
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
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

    def sample_request(self) -> SampleRequest:
        """How to draw its next token."""
        forbidden = self.stop_ids if self.num_output < self.params.min_tokens else ()
        return SampleRequest(self.params, self.seed, self.index, len(self.token_ids), forbidden)
