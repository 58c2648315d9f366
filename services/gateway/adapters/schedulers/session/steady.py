"""A fast check of steps that only add one token to each request, as most steps do."""

from collections.abc import Sequence

from stepwell.scheduler.v1 import scheduler_pb2

from services.gateway.adapters.schedulers.session.sent import Sent


class SteadySteps:
    """The requests of a step whose results were checked one by one. If a later step adds one token
    to each of exactly these requests and ends none, its results are checked by comparing whole
    lists.
    """

    def __init__(self, handles: list[int], totals: list[int], sent: Sequence[Sent]) -> None:
        """`totals` are the requests' numbers of output tokens, including this step's tokens."""
        self._handles, self._totals = handles, totals
        self._ones = [1] * len(handles)
        self._num_left = min(
            one.max_tokens - total for one, total in zip(sent, totals, strict=True)
        )
        self._ending = frozenset[int]().union(*{one.ending for one in sent})

    @classmethod
    def after(
        cls, handles: list[int], totals: list[int], sent: dict[int, Sent]
    ) -> "SteadySteps | None":
        """Makes the object after a step whose results were checked one by one. Returns None if a
        request needs checks that lists do not cover.
        """
        found = [sent[handle] for handle in handles]
        if not found or any(one.needs_more for one in found):
            return None
        return cls(handles, totals, found)

    def take(
        self,
        deltas: scheduler_pb2.StepDeltas,
        handles: list[int],
        counts: list[int],
        token_ids: list[int],
        totals: list[int],
    ) -> bool:
        """Checks a step by comparing lists, and adds its tokens to the counts. Returns False,
        without changes, if the results must be checked one by one.
        """
        if handles != self._handles or counts != self._ones or self._num_left <= 1:
            return False
        if deltas.admitted or deltas.logprobs or deltas.pooled:
            return False
        expected = [total + 1 for total in self._totals]
        if totals != expected or not self._ending.isdisjoint(token_ids):
            return False
        self._totals = expected
        self._num_left -= 1
        return len(token_ids) == len(handles)
