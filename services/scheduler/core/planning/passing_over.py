"""Decides which waiting requests are passed over (skipped).

A request is passed over if it cannot be admitted now for a reason that concerns no other request.
It keeps its position in the queue, and requests behind it may be admitted. A request that lacks
blocks or budget is not passed over: it stops admission, because requests behind it would use up
those resources.
"""

from collections.abc import Iterable

from services.scheduler.core.grammar import GrammarStatus
from services.scheduler.core.output import WaitReason, preparation_wait
from services.scheduler.core.request import Request, RequestStatus


class PassingOver:
    """Decides for one step which requests are passed over, while its admissions are planned.

    A request that is passed over once stays passed over in that step, because admissions free no
    resources.
    """

    def __init__(
        self, max_loras: int | None, running: Iterable[Request], last_updated_step: int
    ) -> None:
        self._max_loras = max_loras
        self._last_updated_step = last_updated_step
        """The last step whose output was applied."""
        self._adapters: set[bytes] = set()
        """Digests of the adapters of all running requests. Requests that this step does not
        schedule count too, because the next step may schedule them.
        """
        if max_loras is not None:
            self._adapters = {request.adapter_digest for request in running} - {b""}

    def copy(self) -> "PassingOver":
        """A copy of the state, on which admissions are planned that may fail."""
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
        """Records that a request runs from this step on."""
        if self._max_loras is not None and request.adapter_digest:
            self._adapters.add(request.adapter_digest)
