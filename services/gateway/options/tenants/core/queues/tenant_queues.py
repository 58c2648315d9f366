"""Queues tenants' sequences (the prompt and one answer of a request), and sends them while the
replicas have free slots. Each tenant has a fair share of the slots for running sequences.
"""

from collections.abc import Callable, Iterator, Sequence

from services.common.telemetry import names
from services.gateway.core.caller import Caller
from services.gateway.core.fleet.admission import Admission, Queued
from services.gateway.core.fleet.replica import Replica
from services.gateway.core.ports import Clock
from services.gateway.core.request.arrivals import Arrivals
from services.gateway.core.request.inflight import Inflight
from services.gateway.core.request.wait import Wait
from services.gateway.core.routing_decision import RoutingDecision
from services.gateway.core.traces.sequence_trace import ResubmitCause
from services.gateway.core.traces.timeline import Part
from services.gateway.options.tenants.core.queues.capacity import Capacity
from services.gateway.options.tenants.core.queues.fair_queue import FairQueue, Order
from services.gateway.options.tenants.core.queues.queue_bounds import (
    QueueBounds,
    TenantQueueFull,
    expected_wait,
    too_late,
)
from services.gateway.options.tenants.core.queues.service_charge import (
    ServiceCharge,
    charge_for,
    measure,
)
from services.gateway.options.tenants.core.queues.slots import FairShares, Slots, TenantUsage
from services.gateway.options.tenants.core.queues.waiter import Waiter, WaitReason, wait_reason
from services.gateway.options.tenants.core.tenant import Tenant

_SHARE_OF_NEWEST = 0.1
"""Weight of the newest answer's length in its tenant's moving mean of answer lengths."""
_SWEEP_SECONDS = 0.1
"""Seconds between two searches for sequences that can no longer start in time."""
_ENDED_AT_A_TIME = 2
"""Limit on the number of sequences that time out in one iteration of the event loop, because all
sequences of a burst time out together, and writing an error to each client takes time.
"""


class TenantQueues(Admission):
    """Queues sequences at the gateway while the replicas have no slot for them, so that the
    replicas' own queues stay short. Each tenant has its own queue. The length of each queue and the
    wait in it are limited.

    1. `add` queues a sequence. `admit` sends the sequences that may occupy a slot. `admit` is
       called whenever a slot may have become free: when a sequence leaves its replica, and when a
       replica reports its load.
    2. `FairShares` determines which tenants may occupy a slot. `FairQueue` chooses the next one of
       these tenants. A tenant's sequences are sent by priority, then in order of arrival.
    3. If no slot is free while a tenant below its share waits, sequences of tenants above their
       shares are preempted. A preempted sequence is aborted at its replica, and queued again with
       its generated tokens.
    4. When a sequence is sent, its tenant is charged for the prompt tokens and for the expected
       output tokens. When the sequence leaves its replica, the charge is corrected.
    """

    def __init__(
        self,
        clock: Clock,
        bounds: QueueBounds,
        arrivals: Arrivals,
        *,
        capacity: Callable[[], Capacity | None],
        send: Callable[[Inflight], object],
    ) -> None:
        """`arrivals` counts the requests that will be queued next. `capacity` returns the current
        capacity of all ready replicas. While it is unknown (None), sequences are sent without
        regard to slots and shares. `send` sends a sequence to a replica.
        """
        self.slots = Slots(clock.time)
        self._clock = clock
        self._bounds = bounds
        self._arrivals = arrivals
        self._capacity = capacity
        self._send = send
        self._queue: FairQueue[Waiter] = FairQueue()
        self._waiters: dict[Inflight, Waiter] = {}
        self._charges: dict[Inflight, ServiceCharge] = {}
        self._starting: set[Inflight] = set()
        """Sequences that were sent, but that no replica has reported as scheduled yet."""
        self._is_sweeping = False
        self._full_with: tuple[int, int] | None = None
        """The numbers of slots and of free slots with which `admit` could send nothing, or None if
        the tenants or their sequences have changed since then. Every step of every replica may
        report its load, and the shares of a thousand tenants take milliseconds to compute.
        """

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Inflight]:
        """Iterates over a copy of the waiting sequences."""
        return iter(list(self._waiters))

    def queued(self) -> list[Queued]:
        now = self._clock.time()
        waiters = self._waiters.values()
        return [Queued(waiter.inflight, waiter.reason, now - waiter.began) for waiter in waiters]

    # New requests and sequences.

    def check_room(self, tenant: Caller, deadline: float | None) -> None:
        """Raises TenantQueueFull if the tenant's queue is full, or if a request would wait in it
        for too long. Raises DeadlineExceeded if a request would not end by `deadline`.
        """
        if not isinstance(tenant, Tenant):
            return
        num_waiting, num_arriving = self.slots.num_waiting(tenant), self._arrivals.num(tenant)
        share, capacity = self.slots.share(tenant), self._capacity()
        if capacity is None:
            self._bounds.check_number(tenant, num_waiting, share)
            return
        num_ahead = num_waiting + num_arriving
        num_to_wait = num_ahead - min(num_arriving, max(0, capacity.num_free))
        self._bounds.check_number(tenant, num_to_wait, share)
        wait = expected_wait(tenant, num_ahead, self.slots.others(tenant), capacity)
        timeout = None if deadline is None else deadline - self._clock.time()
        self._bounds.check_time(tenant, timeout, wait, self._service_seconds(tenant, capacity))

    def queues(self, inflight: Inflight) -> bool:
        return isinstance(inflight.request.caller, Tenant) and not inflight.was_accepted

    def add(self, inflight: Inflight) -> None:
        """Queues a sequence, and sends it at once if its tenant may occupy a slot and no other
        sequence is before it. If the queue is full, the sequence fails with TenantQueueFull.
        """
        tenant = _tenant(inflight)
        for idle in self.slots.drop_idle():
            self._full_with = None
            self._queue.forget(idle)
        num_ahead = self.slots.num_waiting(tenant)
        try:
            self._bounds.check_number(tenant, num_ahead, self.slots.share(tenant))
        except TenantQueueFull as error:
            inflight.failed(error)
            return
        usage, capacity, now = self.slots.usage(tenant), self._capacity(), self._clock.time()
        usage.asked_at = now
        waiter = Waiter(inflight, wait_reason(num_ahead, capacity), num_ahead, now)
        self._enqueue(waiter, self._credit(usage, capacity))
        self.admit()
        waiter.has_to_wait = inflight in self._waiters
        if waiter.has_to_wait:
            wait = {names.ATTR_WAIT_REASON: waiter.reason.value, names.ATTR_NUM_AHEAD: num_ahead}
            inflight.trace.timeline.enter(Part.WAIT, wait)
        self._sweep_later()

    def discard(self, inflight: Inflight) -> None:
        waiter = self._waiters.get(inflight)
        if waiter is not None:
            self._queue.remove(_tenant(inflight), _order(inflight))
            self._remove(waiter)

    # Occupying and freeing slots.

    def admit(self) -> None:
        """Sends waiting sequences until no waiting tenant may occupy a slot. Sequences that can no
        longer start in time fail. After _ENDED_AT_A_TIME of them, `admit` continues in the next
        iteration of the event loop.
        """
        num_late = 0
        while self._waiters and num_late < _ENDED_AT_A_TIME:
            if (slots := self._num_slots()) is not None and slots == self._full_with:
                return
            waiter = self._queue.take(self._may_take_slot(self._preempt()))
            if waiter is None:
                self._full_with = self._num_slots()
                return
            self._remove(waiter)
            if self._is_too_late(waiter, self._capacity()):
                waiter.inflight.failed(too_late(waiter.inflight.request.deadline))
                num_late += 1
            else:
                self._send_waiter(waiter)
        if self._waiters:
            self._clock.call_at(self._clock.time(), self.admit)

    def candidates(self, inflight: Inflight, replicas: Sequence[Replica]) -> Sequence[Replica]:
        """Returns the replicas with a free slot, or all replicas if none has a free slot. If an
        earlier sequence of the request with the same prompt was just sent to one of these replicas,
        returns only this replica, so that both sequences share the prompt's KV blocks.
        """
        if not isinstance(inflight.request.caller, Tenant):
            return replicas
        with_slot = [one for one in replicas if one.num_free_slots > 0] or replicas
        mailbox, index = inflight.mailbox, inflight.index
        if index and mailbox.routes:
            before = mailbox.inflights[index - 1].request
            if before.prompt_token_ids is inflight.request.prompt_token_ids:
                address = mailbox.routes[-1].address
                return [one for one in with_slot if one.address == address] or with_slot
        return with_slot

    def sent(self, inflight: Inflight, route: RoutingDecision) -> None:
        """Counts the slot of a sequence that was sent to a replica, and charges its tenant."""
        tenant = inflight.request.caller
        if not isinstance(tenant, Tenant):
            return
        usage = self.slots.usage(tenant)
        usage.num_running += 1
        usage.num_starting += 1
        self._full_with = None
        self._starting.add(inflight)
        charge = charge_for(inflight, route, usage.mean_output_tokens, self._clock.time())
        self._charges[inflight] = charge
        self._queue.charge(tenant, charge.num_tokens)

    def started(self, inflight: Inflight) -> None:
        """Called when a sequence was scheduled. Sends waiting sequences, which may now start."""
        if self._end_start(inflight):
            self.admit()

    def left(self, inflight: Inflight) -> None:
        """Frees the slot of a sequence that ended or was lost, and then sends waiting sequences.
        Does nothing if the sequence had no slot.
        """
        charge = self._charges.get(inflight)
        if charge is not None:
            self._free_slot(inflight)
            usage = self.slots.usage(_tenant(inflight))
            measure(usage.service_time, inflight, charge, self._clock.time())
            num_output = len(inflight.output_token_ids)
            usage.mean_output_tokens += _SHARE_OF_NEWEST * (num_output - usage.mean_output_tokens)
            self.admit()

    def _num_slots(self) -> tuple[int, int] | None:
        capacity = self._capacity()
        return None if capacity is None else (capacity.num_slots, capacity.num_free)

    def _end_start(self, inflight: Inflight) -> bool:
        if inflight not in self._starting:
            return False
        self._full_with = None
        self._starting.discard(inflight)
        self.slots.usage(_tenant(inflight)).num_starting -= 1
        return True

    def _free_slot(self, inflight: Inflight) -> None:
        """Frees a sequence's slot, and replaces the estimate in its charge by the real tokens."""
        charge = self._charges.pop(inflight)
        self._full_with = None
        self._end_start(inflight)
        tenant = _tenant(inflight)
        self.slots.usage(tenant).num_running -= 1
        num_output = len(inflight.output_token_ids) - charge.num_output_tokens_before
        self._queue.charge(tenant, charge.difference(num_output))

    def _may_take_slot(self, shares: FairShares | None) -> Callable[[Tenant], bool]:
        if shares is None:
            return lambda _: True
        return lambda tenant: shares.may_take_slot(self.slots.usage(tenant))

    def _preempt(self) -> FairShares | None:
        """Preempts sequences until no tenant must free a slot. Returns the tenants' shares after
        that, or None if the replicas' capacity is not known.
        """
        while (capacity := self._capacity()) is not None:
            lags = self._queue.lags()
            shares = self.slots.fair_shares(capacity.num_free, capacity.num_slots, lags)
            usage = shares.to_preempt()
            if usage is None:
                return shares
            self._take_back(self._victim(usage.tenant))
        return None

    def _victim(self, tenant: Tenant) -> Inflight:
        """Returns the tenant's sequence to preempt: the sequence with the largest `priority`
        number, then with the fewest preemptions so far, then with the latest arrival.
        """
        running = (one for one in self._charges if one.request.caller.caller_id == tenant.caller_id)
        return max(
            running, key=lambda one: (one.request.priority, -one.num_times_taken_back, one.number)
        )

    def _take_back(self, inflight: Inflight) -> None:
        self._free_slot(inflight)
        inflight.taken_back(ResubmitCause.PREEMPTED)
        now = self._clock.time()
        reason = WaitReason.PREEMPTED
        waiter = Waiter(inflight, reason, 0, now, was_preempted=True, has_to_wait=True)
        self._enqueue(waiter, 0.0)

    def _enqueue(self, waiter: Waiter, credit_tokens: float) -> None:
        inflight, tenant = waiter.inflight, _tenant(waiter.inflight)
        self._full_with = None
        self._waiters[inflight] = waiter
        self.slots.usage(tenant).num_waiting += 1
        self._queue.add(tenant, _order(inflight), waiter, credit_tokens)

    def _remove(self, waiter: Waiter) -> None:
        self._full_with = None
        del self._waiters[waiter.inflight]
        self.slots.usage(_tenant(waiter.inflight)).num_waiting -= 1

    def _send_waiter(self, waiter: Waiter) -> None:
        inflight = waiter.inflight
        if waiter.has_to_wait:
            now = self._clock.time()
            wait = Wait(waiter.reason, waiter.began, now, waiter.num_ahead)
            inflight.mailbox.waits.append(wait)
        self._send(inflight)

    def _credit(self, usage: TenantUsage, capacity: Capacity | None) -> float:
        """Returns the tenant's credit in the FairQueue: the charge for as many answers of mean
        length as the tenant's share has slots.
        """
        if capacity is None:
            return 0.0
        return usage.tokens_of(capacity.num_slots * self.slots.share(usage.tenant))

    # Timeouts.

    def _sweep_later(self, seconds: float = _SWEEP_SECONDS) -> None:
        if self._waiters and not self._is_sweeping:
            self._is_sweeping = True
            self._clock.call_at(self._clock.time() + seconds, self._sweep)

    def _sweep(self) -> None:
        """Ends at most _ENDED_AT_A_TIME sequences that can no longer start in time, and further
        ones in later iterations of the event loop.
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

    def _is_too_late(self, waiter: Waiter, capacity: Capacity | None) -> bool:
        """Whether a sequence can no longer start in time. For a preempted sequence it is false."""
        if waiter.was_preempted:
            return False
        request = waiter.inflight.request
        seconds = self._service_seconds(_tenant(waiter.inflight), capacity)
        latest = self._bounds.latest_start(waiter.began, request.deadline, seconds)
        return latest is not None and latest <= self._clock.time()

    def _service_seconds(self, tenant: Tenant, capacity: Capacity | None) -> float:
        """Returns a running time in seconds that few sequences of the tenant exceed, or 0 if no
        time was measured.
        """
        usual = self.slots.service_time(tenant).longest_usual
        return usual if capacity is None else max(usual, capacity.service_seconds)


def _tenant(inflight: Inflight) -> Tenant:
    tenant = inflight.request.caller
    assert isinstance(tenant, Tenant)
    return tenant


def _order(inflight: Inflight) -> Order:
    return inflight.request.priority, inflight.number
