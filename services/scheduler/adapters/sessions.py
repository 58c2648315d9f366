"""Who waits for which request: the sessions of gateways, and the way back to each."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2
from stepwell.worker.v1 import worker_pb2

from services.common.errors import StepwellError
from services.common.status import status_code
from services.scheduler.adapters.outbox import Outbox
from services.scheduler.core.plan import RequestUpdate, StepPlan
from services.scheduler.core.request import FinishReason, Request


@dataclass(slots=True, eq=False)
class GatewaySession:
    """One gateway's stream and the requests that came through it, by handle."""

    gateway_id: str
    outbox: Outbox = field(default_factory=Outbox)
    requests: dict[int, Request] = field(default_factory=dict)

    def reject(self, handle: int, error: StepwellError) -> None:
        """Answers a request that was refused at the door."""
        self.outbox.rejected(
            scheduler_pb2.Rejection(
                handle=handle,
                code=status_code(error).value[0],
                reason=error.error_reason,
                field=error.field or "",
                message=error.message,
                retry_after_millis=round(1000 * (error.retry_after_seconds or 0)),
            )
        )


@dataclass(slots=True)
class _Owner:
    session: GatewaySession
    handle: int
    num_prompt_rows: int = 0
    """Rows of prompt log-probabilities that were sent: a recomputed prompt brings them again."""


class Sessions:
    """All sessions of a scheduler: a `Delivery` that sorts news by whom they concern."""

    def __init__(self) -> None:
        self.num_generated_tokens = 0
        self.num_finished = 0
        self.num_corrupted = 0
        """Of those that finished, requests whose logits held NaN."""
        self._sessions: set[GatewaySession] = set()
        self._owners: dict[Request, _Owner] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, gateway_id: str) -> GatewaySession:
        """A new session."""
        session = GatewaySession(gateway_id)
        self._sessions.add(session)
        return session

    def close(self, session: GatewaySession) -> list[Request]:
        """Forgets a session; returns its requests that nobody waits for now."""
        self._sessions.discard(session)
        orphans = list(session.requests.values())
        for request in orphans:
            self._owners.pop(request, None)
        session.requests.clear()
        return orphans

    def own(self, session: GatewaySession, handle: int, request: Request) -> None:
        """Notes who waits for a request."""
        session.requests[handle] = request
        self._owners[request] = _Owner(session, handle)

    def find(self, request_ids: Iterable[str]) -> list[Request]:
        """The requests of these names that are alive."""
        wanted = set(request_ids)
        return [request for request in self._owners if request.request_id in wanted]

    def deliver(self, plan: StepPlan | None, updates: Iterable[RequestUpdate]) -> None:
        touched: set[GatewaySession] = set()
        for request in plan.new if plan is not None else ():
            owner = self._owners.get(request)
            if owner is not None and request.num_cached_tokens is not None:
                owner.session.outbox.admitted(owner.handle, request.num_cached_tokens)
                touched.add(owner.session)
        for update in updates:
            self.num_generated_tokens += len(update.token_ids)
            reason = update.request.finish_reason
            if reason is not None:
                self.num_finished += 1
                self.num_corrupted += reason is FinishReason.NAN_IN_LOGITS
            owner = self._owners.get(update.request)
            if owner is not None:
                self._deliver_to(owner, plan.step if plan is not None else 0, update)
                touched.add(owner.session)
        for session in touched:
            session.outbox.flush()

    def _deliver_to(self, owner: _Owner, step: int, update: RequestUpdate) -> None:
        outbox, request = owner.session.outbox, update.request
        if update.token_ids:
            outbox.tokens(step, owner.handle, update.token_ids)
        if isinstance(update.logprobs, worker_pb2.RequestLogprobs):
            outbox.logprobs(
                owner.handle, _unsent(owner, update.logprobs, update.num_computed_tokens)
            )
        if request.is_finished:
            outbox.finished(owner.handle, request)
            owner.session.requests.pop(owner.handle, None)
            del self._owners[request]


def _unsent(
    owner: _Owner, item: worker_pb2.RequestLogprobs, num_computed: int
) -> worker_pb2.RequestLogprobs:
    """Leaves out prompt rows that were sent before a preemption made the prompt be recomputed.

    The first row of a chunk that starts at `num_computed` belongs to the prompt token after it.
    """
    if not item.HasField("prompt"):
        return item
    rows = len(item.prompt.ranks)
    known = min(max(owner.num_prompt_rows - num_computed, 0), rows)
    owner.num_prompt_rows = max(owner.num_prompt_rows, num_computed + rows)
    if not known:
        return item
    width = item.prompt.width
    fresh = worker_pb2.RequestLogprobs(index=item.index)
    if item.HasField("sampled"):
        fresh.sampled.CopyFrom(item.sampled)
    if known < rows:
        fresh.prompt.CopyFrom(
            common_pb2.Logprobs(
                width=width,
                token_ids=item.prompt.token_ids[known * width :],
                logprobs=item.prompt.logprobs[known * width :],
                ranks=item.prompt.ranks[known:],
            )
        )
    return fresh
