"""Assigns each request to the session (gRPC stream) of its gateway, and distributes messages to
gateways. A client's session, in contrast, is a request with several turns.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from stepwell.scheduler.v1 import scheduler_pb2
from stepwell.worker.v1 import worker_pb2

from services.common.errors import StepwellError
from services.common.replica.load import ReplicaLoad
from services.common.replica.messages import queue_state_to_proto, replica_load_to_proto
from services.common.replica.queue_state import QueueState
from services.common.request.finish import CLIENT_ERRORS, FinishReason
from services.scheduler.adapters.gateways.gateway_session import GatewaySession
from services.scheduler.core.output import EngineCoreOutputs, SchedulerOutput
from services.scheduler.core.request import Request, TurnEnd

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Owner:
    session: GatewaySession
    handle: int
    num_uncomputed_tokens: int = 0
    """Number of the request's prompt tokens that are not computed yet."""
    is_admitted: bool = False
    """Whether the gateway knows that the request, or a client's session's turn, was admitted."""
    num_prompt_rows: int = 0
    """Number of rows of prompt log-probabilities that were sent. No row is sent twice."""


@dataclass(frozen=True, slots=True)
class _Share:
    """One session's requests in a step: their indexes in the plan, and their handles."""

    session: GatewaySession
    indexes: list[int] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)


class Sessions:
    """All sessions of a scheduler (implements `Delivery`). Distributes the outputs of steps among
    them. Looks up the sessions of a step's requests only if the previous step had other requests.
    """

    def __init__(self) -> None:
        self.num_generated_tokens = 0
        self.num_finished = 0
        self.num_completed = 0
        """Number of finished requests (and turns of clients' sessions) that had been admitted."""
        self.num_corrupted = 0
        """Number of finished requests whose logits contained NaN."""
        self.state = scheduler_pb2.ReplicaState(ready=True)
        """The replica's state (such as whether steps can run) that was last sent to gateways."""
        self._sessions: dict[GatewaySession, None] = {}
        self._gateways: dict[GatewaySession, None] = {}
        """The sessions of gateways, without sessions of other gRPC services."""
        self._owners: dict[Request, _Owner] = {}
        self._num_uncomputed = 0
        """Number of prompt tokens of all requests that are not computed yet."""
        self._num_sent = 0, 0
        """The numbers of requests and of uncomputed prompt tokens that were last sent."""
        self._speeds = 0.0, 0.0
        self._sorted: Sequence[Request] = ()
        self._shares: list[_Share] = []

    def __len__(self) -> int:
        """The number of connected gateways."""
        return len(self._gateways)

    def open(self, gateway_id: str) -> GatewaySession:
        session = self.open_call(gateway_id)
        self._gateways[session] = None
        self._send_load()
        return session

    def open_call(self, name: str) -> GatewaySession:
        """Opens a session for the requests of a gRPC call, to which no replica states are sent."""
        session = GatewaySession(name)
        self._sessions[session] = None
        return session

    def close(self, session: GatewaySession) -> list[Request]:
        """Removes a session. Returns its requests, which the caller must abort."""
        self._sessions.pop(session, None)
        self._gateways.pop(session, None)
        unowned = list(session.requests.values())
        for request in unowned:
            self._pop_owner(request)
        session.requests.clear()
        self._sorted = ()
        return unowned

    def announce(self, state: scheduler_pb2.ReplicaState) -> None:
        """Sends the replica's state (such as whether steps can run) to every gateway."""
        self.state = state
        for session in self._gateways:
            session.outbox.announce(state)

    def announce_to_quiet(self) -> None:
        """Sends the replica's state to gateways to which nothing was sent since the last call."""
        for session in self._gateways:
            session.outbox.num_quiet_calls += 1
            if session.outbox.num_quiet_calls > 1:
                session.outbox.announce(self.state)

    def report(
        self, queue: QueueState, seconds_per_prompt_token: float, seconds_per_decode: float
    ) -> None:
        """Sends the queue state and the load to every gateway, if they have changed. They are sent
        with the gateway's next deltas (new tokens and ends of requests). If there are no deltas
        until the next call of `report`, they are sent in separate messages.

        Each call counts all uncomputed prompt tokens. Between two calls, each step's tokens are
        subtracted, but tokens that must be computed again are not added.
        """
        for session in self._gateways:
            if session.queue_announced != queue:
                session.queue_announced = queue
                session.outbox.note_queue(queue_state_to_proto(queue))
        for request, owner in self._owners.items():
            num_tokens = request.num_prompt_tokens - request.num_computed_tokens
            owner.num_uncomputed_tokens = max(0, num_tokens)
        self._num_uncomputed = sum(owner.num_uncomputed_tokens for owner in self._owners.values())
        self._speeds = seconds_per_prompt_token, seconds_per_decode
        self._note_load()
        for session in self._gateways:
            session.outbox.report(may_wait=bool(session.requests))

    def _send_load(self) -> None:
        self._note_load()
        for session in self._gateways:
            session.outbox.report(may_wait=False)

    def _note_load(self) -> None:
        num_requests, num_uncomputed = self._num_sent = len(self._owners), self._num_uncomputed
        for session in self._gateways:
            num_others = num_requests - len(session.requests)
            load = ReplicaLoad(num_requests, num_uncomputed, *self._speeds, num_others)
            if session.load_announced != load:
                session.load_announced = load
                session.outbox.note_load(replica_load_to_proto(load))

    def _send_load_if_changed(self) -> None:
        if self._num_sent != (len(self._owners), self._num_uncomputed):
            self._send_load()

    def _count_computed(self, plan: SchedulerOutput) -> None:
        """Subtracts a step's tokens, and prefix hits, from the uncomputed prompt tokens."""
        begun = {*plan.new}
        counts = zip(
            plan.requests, plan.num_scheduled_tokens, plan.num_computed_tokens, strict=True
        )
        for request, num_tokens, start in counts:
            owner = self._owners.get(request) if num_tokens > 1 or request in begun else None
            if owner is not None and owner.num_uncomputed_tokens:
                left = max(0, request.num_prompt_tokens - start - num_tokens)
                self._num_uncomputed += left - owner.num_uncomputed_tokens
                owner.num_uncomputed_tokens = left

    def wake(self) -> None:
        """Makes the session of every gateway check whether the session should end."""
        for session in self._gateways:
            session.outbox.wake()

    def own(self, session: GatewaySession, handle: int, request: Request) -> None:
        session.requests[handle] = request
        self._owners[request] = _Owner(session, handle, request.num_prompt_tokens)
        self._num_uncomputed += request.num_prompt_tokens

    def disown(self, session: GatewaySession, handle: int) -> None:
        """Forgets a request that is about to end, so that its end is not sent to the gateway."""
        self._pop_owner(session.requests.pop(handle))
        self._sorted = ()

    def refuse(self, request: Request, error: StepwellError) -> None:
        """Sends a refusal of a request that ends here, so that the gateway submits it again."""
        owner = self._owners.get(request)
        if owner is not None:
            owner.session.reject(owner.handle, error)
            self.disown(owner.session, owner.handle)

    def find(self, request_ids: Iterable[str]) -> list[Request]:
        wanted = set(request_ids)
        return [request for request in self._owners if request.request_id in wanted]

    def deliver(self, update: EngineCoreOutputs) -> None:
        plan, token_ids = update.plan, update.token_ids
        self.num_generated_tokens += update.num_tokens
        if plan.new or plan.resumed:
            self._deliver_admissions(plan)
        shares = self._shares_of(plan.requests)
        num_output = _num_output_tokens(update) if shares else []
        for share in shares:
            if len(share.indexes) == len(token_ids):
                share.session.outbox.tokens(plan.step, share.handles, token_ids, num_output)
            else:
                theirs = [token_ids[index] for index in share.indexes]
                num_theirs = [num_output[index] for index in share.indexes]
                share.session.outbox.tokens(plan.step, share.handles, theirs, num_theirs)
        if update.logprobs:
            self._deliver_logprobs(update)
        if update.pooled:
            self._deliver_pooled(update)
        if update.turns:
            self._deliver_turns(update.turns)
        if plan.num_tokens > len(plan.requests) or plan.new:
            self._count_computed(plan)
        self._deliver_ends(update.ended)
        if plan.requests or update.ended:  # other steps have no deltas
            self._send_load_if_changed()
        for session in self._sessions:
            session.flush()

    def _deliver_admissions(self, plan: SchedulerOutput) -> None:
        """Informs gateways of requests that are admitted for the first time. If the step was lost,
        the next admission counts as the first.
        """
        for request in chain(plan.new, plan.resumed):
            owner, num_cached = self._owners.get(request), request.num_cached_tokens
            if owner is not None and not owner.is_admitted and num_cached is not None:
                owner.is_admitted = True
                owner.session.outbox.admitted(owner.handle, num_cached)

    def _deliver_logprobs(self, update: EngineCoreOutputs) -> None:
        plan = update.plan
        for index, item in update.logprobs.items():
            owner, tokens = self._owners.get(plan.requests[index]), update.token_ids[index]
            if owner is None or tokens is None:
                continue
            if isinstance(item, worker_pb2.RequestLogprobs):
                num_known = 0
                if item.HasField("prompt"):
                    # Row i of a chunk belongs to the token after position `start + i`.
                    start = plan.num_computed_tokens[index]
                    num_known = max(owner.num_prompt_rows - start, 0)
                    end = start + len(item.prompt.ranks)
                    owner.num_prompt_rows = max(owner.num_prompt_rows, end)
                owner.session.outbox.logprobs(owner.handle, item, len(tokens), num_known)

    def _deliver_pooled(self, update: EngineCoreOutputs) -> None:
        for index, values in update.pooled.items():
            owner, tokens = self._owners.get(update.plan.requests[index]), update.token_ids[index]
            if owner is not None and tokens is not None and isinstance(values, bytes):
                owner.session.outbox.pooled(owner.handle, values)

    def _deliver_turns(self, turns: Mapping[Request, TurnEnd]) -> None:
        for request, end in turns.items():
            self.num_completed += 1
            if (owner := self._owners.get(request)) is not None:
                owner.is_admitted = False
                owner.session.outbox.turn_ended(owner.handle, end.turn)

    def deliver_ends(self, requests: Sequence[Request]) -> None:
        self._deliver_ends(requests)
        self._send_load_if_changed()

    def _deliver_ends(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.num_finished += 1
            self.num_completed += request.num_cached_tokens is not None
            if request.finish_reason is FinishReason.NAN_IN_LOGITS:
                self.num_corrupted += 1
                logger.error(
                    "request ended with an error: the model computed NaN in its logits",
                    extra=request.log_fields,
                )
            elif request.finish_reason is FinishReason.ERROR:
                logger.warning("request failed: %s", request.error, extra=request.log_fields)
            elif request.finish_reason in CLIENT_ERRORS:
                logger.info(
                    "request ended, because of an error of the client: %s",
                    request.error,
                    extra=request.log_fields,
                )
            owner = self._pop_owner(request)
            if owner is not None:
                owner.session.outbox.finished(owner.handle, request)
                owner.session.requests.pop(owner.handle, None)
                owner.session.note_context(owner.handle, request.context)
                owner.session.outbox.flush()
                self._sorted = ()

    def _pop_owner(self, request: Request) -> _Owner | None:
        owner = self._owners.pop(request, None)
        if owner is not None:
            self._num_uncomputed -= owner.num_uncomputed_tokens
        return owner

    def _shares_of(self, requests: Sequence[Request]) -> list[_Share]:
        if requests != self._sorted:
            shares: dict[GatewaySession, _Share] = {}
            for index, request in enumerate(requests):
                owner = self._owners.get(request)
                if owner is None:
                    continue
                share = shares.get(owner.session)
                if share is None:
                    share = shares[owner.session] = _Share(owner.session)
                share.indexes.append(index)
                share.handles.append(owner.handle)
            self._sorted, self._shares = requests, list(shares.values())
        return self._shares


def _num_output_tokens(update: EngineCoreOutputs) -> list[int]:
    """Number of output tokens of each request of a step, including the new tokens. If a turn of a
    client's session ended with the step, only the tokens of this turn count.
    """
    requests, turns = update.plan.requests, update.turns
    if turns:
        requests = [turns[one].turn if one in turns else one for one in requests]
    return [len(request.token_ids) - request.num_prompt_tokens for request in requests]
