"""Which waiting requests are passed over: they cannot be admitted now for a reason of their own,
while those behind them can.

A request that is passed over keeps its place in the queue, and does not stop the admission of
others. One that lacks blocks or budget does: others would take them before it.
"""

from collections.abc import Iterable

from services.scheduler.core.grammar import GrammarStatus
from services.scheduler.core.output import WaitReason, preparation_wait
from services.scheduler.core.request import Request, RequestStatus


class PassingOver:
    """The requests that are passed over in one step, as its admissions are planned.

    Once a request is passed over in a step it would be again: admissions take what it lacks and
    give nothing back.
    """

    def __init__(
        self, max_loras: int | None, running: Iterable[Request], last_updated_step: int
    ) -> None:
        self._max_loras = max_loras
        self._last_updated_step = last_updated_step
        """The last step whose output was taken in."""
        self._adapters: set[bytes] = set()
        """Adapters of all running requests, scheduled in this step or not: they may be in the next
        one.
        """
        if max_loras is not None:
            self._adapters = {request.adapter_digest for request in running} - {b""}

    def copy(self) -> "PassingOver":
        """The same state, to plan admissions on that may not come about."""
        if self._max_loras is None:
            return self
        copy = PassingOver(self._max_loras, (), self._last_updated_step)
        copy._adapters = set(self._adapters)
        return copy

    def reason(self, request: Request) -> WaitReason | None:
        """Why a request is passed over; None if it is not."""
        if request.status is RequestStatus.WAITING_FOR_CHUNK:
            return WaitReason.SESSION
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            return WaitReason.REMOTE_KV
        if request.grammar is not None and request.grammar is not GrammarStatus.READY:
            return preparation_wait(request)
        if request.awaited_step is not None and request.awaited_step > self._last_updated_step:
            return WaitReason.OUTPUT_IN_FLIGHT
        adapter = request.adapter_digest
        if not adapter or self._max_loras is None or adapter in self._adapters:
            return None
        return WaitReason.ADAPTERS if len(self._adapters) >= self._max_loras else None

    def admit(self, request: Request) -> None:
        """Notes that a request runs from this step on."""
        if self._max_loras is not None and request.adapter_digest:
            self._adapters.add(request.adapter_digest)
