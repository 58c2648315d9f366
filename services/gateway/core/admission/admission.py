"""Lets sequences through to the replicas, those of each tenant as its share allows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from services.common import names
from services.gateway.core.admission.arrivals import Arrivals
from services.gateway.core.admission.capacity import Capacity
from services.gateway.core.admission.fair_queue import FairQueue, Order
from services.gateway.core.admission.places import Division, Places, Use
from services.gateway.core.admission.queue_bounds import (
    QueueBounds,
    TenantQueueFull,
    expected_wait,
    too_late,
)
from services.gateway.core.admission.service_charge import ServiceCharge, charge_for
from services.gateway.core.admission.service_time import ServiceTime
from services.gateway.core.admission.wait import Wait, WaitReason, wait_reason
from services.gateway.core.inflight import Inflight, ended
from services.gateway.core.ports import Clock
from services.gateway.core.route import Route
from services.gateway.core.sequence_trace import ResubmitCause
from services.gateway.core.tenant import Tenant
from services.gateway.core.timeline import Part

_SHARE_OF_NEWEST = 0.1
"""In the mean length of a tenant's answers."""
_SWEEP_SECONDS = 0.1
"""How often sequences are looked for that have waited too long."""
_ENDED_AT_A_TIME = 2
"""Of those, in one turn of the event loop, in which their clients are answered: the requests that
came together in the first moment of a flood are too late together.
"""


@dataclass(slots=True)
class _Waiter:
    """A sequence that waits."""

    inflight: Inflight
    reason: WaitReason
    num_ahead: int
    """Sequences of its tenant that waited before it."""
    began: float
    was_sent: bool = False
    """Whether it had a place and gave it back: then it waits without a limit of time."""
    has_to_wait: bool = False
    """Whether it did not get a place at once."""


class Admission:
    """Queues the sequences of tenants while the replicas have no place for them, each tenant's in a
    queue of its own that is bounded in number and time; the replicas' own queues stay short.

    1. `add` queues a sequence. `admit` sends those that may go, and is called whenever a place may
       have become free: a sequence left its replica, or a replica reported.
    2. Places says which tenants may take one, FairQueue which of these is next. Sequences of one
       tenant go by priority, then in order of arrival.
    3. Where a tenant below its share would have to wait for a place, a sequence of a tenant above
       its share is taken back from its replica: it waits here, and goes on with its tokens so far.
    4. A tenant has few sequences at once whose prompts are not computed yet, so that those of other
       tenants do not wait for all of them.
    5. What a sequence will cost is estimated when it is sent, and settled when it has left.
    """

    def __init__(
        self,
        clock: Clock,
        bounds: QueueBounds,
        *,
        capacity: Callable[[], Capacity | None],
        send: Callable[[Inflight], object],
    ) -> None:
        """`capacity` is what the ready replicas can take now; while it is not known, everything
        goes through. `send` sends a sequence to one of them.
        """
        self.arrivals = Arrivals()
        self.places = Places(clock.time)
        self._clock = clock
        self._bounds = bounds
        self._capacity = capacity
        self._send = send
        self._queue: FairQueue[_Waiter] = FairQueue()
        self._waiters: dict[Inflight, _Waiter] = {}
        self._charges: dict[Inflight, ServiceCharge] = {}
        self._starting: set[Inflight] = set()
        """Sequences that were sent, and of which it is not known yet that they were scheduled."""
        self._is_sweeping = False

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Inflight]:
        """The sequences that wait; a copy."""
        return iter(list(self._waiters))

    def waits(self) -> list[tuple[Inflight, WaitReason, float]]:
        """The sequences that wait, why, and for how many seconds so far."""
        now = self._clock.time()
        waiters = self._waiters.values()
        return [(waiter.inflight, waiter.reason, now - waiter.began) for waiter in waiters]

    # Requests and sequences that come.

    def check_room(self, tenant: Tenant, deadline: float | None) -> None:
        """Raises TenantQueueFull if the tenant's queue takes no further request, DeadlineExceeded
        if one with this deadline would not be done in time.
        """
        num_waiting, num_arriving = self.places.num_waiting(tenant), self.arrivals.num(tenant)
        share, capacity = self.places.share(tenant), self._capacity()
        if capacity is None:
            self._bounds.check_number(tenant, num_waiting, share)
            return
        num_ahead = num_waiting + num_arriving
        num_to_wait = num_ahead - min(num_arriving, max(0, capacity.num_free))
        self._bounds.check_number(tenant, num_to_wait, share)
        wait = expected_wait(tenant, num_ahead, self.places.others(tenant), capacity)
        timeout = None if deadline is None else deadline - self._clock.time()
        self._bounds.check_time(tenant, timeout, wait, self._service_seconds(tenant, capacity))

    def add(self, inflight: Inflight) -> None:
        """Queues a new sequence, and sends it if it may go at once."""
        tenant = inflight.request.tenant
        for idle in self.places.drop_idle():
            self._queue.forget(idle)
        num_ahead = self.places.num_waiting(tenant)
        try:
            self._bounds.check_number(tenant, num_ahead, self.places.share(tenant))
        except TenantQueueFull as error:
            inflight.failed(error)
            return
        use, capacity, now = self.places.of(tenant), self._capacity(), self._clock.time()
        use.asked_at = now
        waiter = _Waiter(inflight, wait_reason(num_ahead, capacity), num_ahead, now)
        self._enqueue(waiter, self._credit(use, capacity))
        self.admit()
        waiter.has_to_wait = inflight in self._waiters
        if waiter.has_to_wait:
            wait = {names.ATTR_WAIT_REASON: waiter.reason.value, names.ATTR_NUM_AHEAD: num_ahead}
            inflight.trace.timeline.enter(Part.WAIT, wait)
        self._sweep_later()

    def discard(self, inflight: Inflight) -> None:
        """Removes a sequence from the queue of its tenant. Does nothing if it does not wait."""
        waiter = self._waiters.get(inflight)
        if waiter is not None:
            self._queue.remove(inflight.request.tenant, _order(inflight))
            self._remove(waiter)

    # Places that are taken and become free.

    def admit(self) -> None:
        """Sends the sequences that may go now."""
        num_late = 0
        while self._waiters and num_late < _ENDED_AT_A_TIME:
            waiter = self._queue.take(self._may_take_place(self._divided()))
            if waiter is None:
                return
            self._remove(waiter)
            if self._is_too_late(waiter, self._capacity()):
                waiter.inflight.failed(too_late(waiter.inflight.request.deadline))
                num_late += 1
            else:
                self._send_waiter(waiter)
        if self._waiters:
            self._clock.call_at(self._clock.time(), self.admit)

    def sent(self, inflight: Inflight, route: Route) -> None:
        """Counts the place of a sequence that was sent to a replica, and charges its tenant."""
        tenant = inflight.request.tenant
        use = self.places.of(tenant)
        use.num_running += 1
        use.num_starting += 1
        self._starting.add(inflight)
        charge = charge_for(inflight, route, use.mean_output_tokens, self._clock.time())
        self._charges[inflight] = charge
        self._queue.charge(tenant, charge.num_tokens)

    def started(self, inflight: Inflight) -> None:
        """Notes that a sequence was scheduled by its replica: its tenant may start another one."""
        if self._end_start(inflight):
            self.admit()

    def left(self, inflight: Inflight) -> None:
        """Frees the place of a sequence that left its replica, for whatever reason. Does nothing if
        it had none.
        """
        charge = self._charges.get(inflight)
        if charge is not None:
            self._free_place(inflight)
            use = self.places.of(inflight.request.tenant)
            _note_time(use.service_time, inflight, charge, self._clock.time())
            num_output = len(inflight.output_token_ids)
            use.mean_output_tokens += _SHARE_OF_NEWEST * (num_output - use.mean_output_tokens)
            self.admit()

    def _end_start(self, inflight: Inflight) -> bool:
        """Counts a sequence no longer among those that start; returns whether it was one."""
        if inflight not in self._starting:
            return False
        self._starting.discard(inflight)
        self.places.of(inflight.request.tenant).num_starting -= 1
        return True

    def _free_place(self, inflight: Inflight) -> None:
        """Frees the place of a sequence, and corrects the charge by what came of it."""
        charge = self._charges.pop(inflight)
        self._end_start(inflight)
        tenant = inflight.request.tenant
        self.places.of(tenant).num_running -= 1
        num_output = len(inflight.output_token_ids) - charge.num_output_tokens_before
        self._queue.charge(tenant, charge.difference(num_output))

    def _may_take_place(self, division: Division | None) -> Callable[[Tenant], bool]:
        if division is None:
            return lambda _: True
        return lambda tenant: division.may_take(self.places.of(tenant))

    def _divided(self) -> Division | None:
        """How places are divided now, after those that are to be given back were; None while that
        is not known.
        """
        while (capacity := self._capacity()) is not None:
            lags = self._queue.lags()
            division = self.places.divided(capacity.num_free, capacity.num_places, lags)
            use = division.gives_back()
            if use is None:
                return division
            self._take_back(self._latest(use.tenant))
        return None

    def _latest(self, tenant: Tenant) -> Inflight:
        """The sequence of a tenant that gives its place back: of those with the last priority, the
        one that was taken back least often, and of these the one that came last. Only the end of
        its last block has to be computed again.
        """
        running = (one for one in self._charges if one.request.tenant.tenant_id == tenant.tenant_id)
        return max(
            running, key=lambda one: (one.request.priority, -one.num_times_taken_back, one.number)
        )

    def _take_back(self, inflight: Inflight) -> None:
        """Takes a sequence back from its replica. It waits before those of its tenant that came
        later.
        """
        self._free_place(inflight)
        inflight.taken_back(ResubmitCause.PREEMPTED)
        now = self._clock.time()
        waiter = _Waiter(inflight, WaitReason.PREEMPTED, 0, now, was_sent=True, has_to_wait=True)
        self._enqueue(waiter, 0.0)

    def _enqueue(self, waiter: _Waiter, credit_tokens: float) -> None:
        inflight = waiter.inflight
        self._waiters[inflight] = waiter
        self.places.of(inflight.request.tenant).num_waiting += 1
        self._queue.add(inflight.request.tenant, _order(inflight), waiter, credit_tokens)

    def _remove(self, waiter: _Waiter) -> None:
        """Forgets a waiter that was taken from the queue."""
        del self._waiters[waiter.inflight]
        self.places.of(waiter.inflight.request.tenant).num_waiting -= 1

    def _send_waiter(self, waiter: _Waiter) -> None:
        inflight = waiter.inflight
        if waiter.has_to_wait:
            now = self._clock.time()
            wait = Wait(waiter.reason, waiter.began, now, waiter.num_ahead)
            inflight.mailbox.waits.append(wait)
        self._send(inflight)

    def _credit(self, use: Use, capacity: Capacity | None) -> float:
        """The tokens of as many answers as the tenant's share of all places holds."""
        if capacity is None:
            return 0.0
        return use.tokens_of(capacity.num_places * self.places.share(use.tenant))

    # What waits too long.

    def _sweep_later(self, seconds: float = _SWEEP_SECONDS) -> None:
        if self._waiters and not self._is_sweeping:
            self._is_sweeping = True
            self._clock.call_at(self._clock.time() + seconds, self._sweep)

    def _sweep(self) -> None:
        """Ends sequences that can no longer start in time: a few now, and if there are more, the
        rest in later turns of the event loop.
        """
        self._is_sweeping = False
        capacity = self._capacity()
        waiters = self._waiters.values()
        late = [waiter for waiter in waiters if self._is_too_late(waiter, capacity)]
        for waiter in late[:_ENDED_AT_A_TIME]:
            self.discard(waiter.inflight)
            waiter.inflight.failed(too_late(waiter.inflight.request.deadline))
        self.admit()
        self._sweep_later(0.0 if len(late) > _ENDED_AT_A_TIME else _SWEEP_SECONDS)

    def _is_too_late(self, waiter: _Waiter, capacity: Capacity | None) -> bool:
        """Whether a sequence has waited for longer than it may."""
        if waiter.was_sent:
            return False
        request = waiter.inflight.request
        seconds = self._service_seconds(request.tenant, capacity)
        latest = self._bounds.latest_start(waiter.began, request.deadline, seconds)
        return latest is not None and latest <= self._clock.time()

    def _service_seconds(self, tenant: Tenant, capacity: Capacity | None) -> float:
        """How long sequences of the tenant usually run at most, as far as that is known."""
        usual = self.places.service_time(tenant).longest_usual
        return usual if capacity is None else max(usual, capacity.service_seconds)


def _order(inflight: Inflight) -> Order:
    return inflight.request.priority, inflight.number


def _note_time(times: ServiceTime, inflight: Inflight, charge: ServiceCharge, now: float) -> None:
    """Counts the time of a sequence that was served from its first token to its last; of one that
    was not, where it was already longer than usual.
    """
    if charge.num_output_tokens_before:
        return
    seconds = now - charge.sent_at
    has_ended = inflight.was_stopped or ended(inflight) is not None
    if has_ended or seconds > times.longest_usual > 0:
        times.add(seconds)
