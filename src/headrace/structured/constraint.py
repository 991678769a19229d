"""Where one sequence stands in its grammar."""

from concurrent.futures import Future, ThreadPoolExecutor

import llguidance
import numpy as np
from numpy.typing import NDArray

from headrace.errors import HeadraceError, RequestError

# For the masks of all sequences, which are computed while the model runs: it leaves little of the CPU to more threads.
_THREADS = ThreadPoolExecutor(2, "mask")


class Constraint:
    """Follows one sequence's output. What it allows depends on the tokens of the output alone.

    finished: nothing can be added to the output any more.
    error: why the grammar cannot be followed any longer, once that is so: some take too much work at some point.
    """

    def __init__(self, beginning: llguidance.LLMatcher) -> None:
        """beginning: the compiled grammar, of which a copy is made."""
        self._matcher = beginning.deep_copy()
        self.finished = False
        self.error: HeadraceError | None = None

    def masks(self, draft: list[int] | None = None) -> list[Future[NDArray[np.int32]]]:
        """The tokens that may come next, as SampleRequest wants them, once they are computed; and after each token of
        a draft, all of which the grammar has to allow (see `allowed`), those that might come after it."""
        draft = draft or []
        matchers = [self._matcher, *(self._matcher.deep_copy() for _ in draft)]
        return [_THREADS.submit(_mask, matcher, draft[:count]) for count, matcher in enumerate(matchers)]

    def allowed(self, draft: list[int]) -> list[int]:
        """The beginning of a draft that fits the grammar."""
        return draft[: self._matcher.validate_tokens(draft)]

    def accept(self, token_id: int) -> None:
        """Takes the token that was drawn."""
        self._matcher.consume_token(token_id)
        if self._matcher.is_error():
            reason = " ".join(self._matcher.get_error().split("<state>")[0].split())[:200]
            message = f"the output cannot follow its grammar any further: {reason}"
            self.error = RequestError(message, "structured_outputs")
        self.finished = self._matcher.is_stopped()


def _mask(matcher: llguidance.LLMatcher, token_ids: list[int]) -> NDArray[np.int32]:
    """What a matcher allows after some more tokens, which it takes."""
    for token in token_ids:
        matcher.consume_token(token)
    return np.frombuffer(matcher.compute_bitmask(), np.int32)
