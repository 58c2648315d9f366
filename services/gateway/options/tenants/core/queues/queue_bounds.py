"""Limits on the length of a tenant's queue at the gateway, and on the wait in the queue."""

from collections.abc import Iterable
from dataclasses import dataclass

from services.common.errors import DeadlineExceeded, QuotaExceeded, ResourceExhausted, StepwellError
from services.common.replica.queue_state import RETRY_AFTER_SECONDS, longest_wait
from services.gateway.options.tenants.core.queues.capacity import Capacity
from services.gateway.options.tenants.core.queues.slots import TenantUsage
from services.gateway.options.tenants.core.tenant import Tenant


class TenantQueueFull(QuotaExceeded):
    """The tenant's queue is full, or another request would wait in the queue for too long."""

    reason = "TENANT_QUEUE_FULL"


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """The limits of each tenant's queue. A queue has at most `max_num_waiting` sequences, and at
    most the tenant's share (by weight) of `max_total_waiting`. A sequence waits for at most
    `max_queue_seconds`, where 0 means no limit.
    """

    max_num_waiting: int
    max_total_waiting: int
    max_queue_seconds: float

    def check_number(self, tenant: Tenant, num_waiting: int, share: float) -> None:
        """Raises TenantQueueFull if a queue with `num_waiting` sequences is full. `share` is the
        tenant's weight divided by the sum of all tenants' weights.
        """
        most = min(self.max_num_waiting, max(1, int(self.max_total_waiting * share)))
        if num_waiting >= most:
            raise _queue_full(
                tenant, f"{num_waiting} of its requests are waiting, at most {most} may wait", 0.0
            )

    def check_time(
        self, tenant: Tenant, timeout_seconds: float | None, wait: float, service_seconds: float
    ) -> None:
        """Raises TenantQueueFull if `wait`, the expected wait in seconds, exceeds
        `max_queue_seconds`. Raises DeadlineExceeded if the request would not end within
        `timeout_seconds`. `service_seconds` is the request's expected running time.
        """
        if self.max_queue_seconds and wait > self.max_queue_seconds:
            excess = wait - self.max_queue_seconds
            raise _queue_full(
                tenant,
                f"a further request would wait for about {wait:.1f} s, "
                f"more than {self.max_queue_seconds:g} s",
                excess,
            )
        if timeout_seconds is None:
            return
        longest = longest_wait(timeout_seconds, service_seconds)
        if wait > longest:
            raise DeadlineExceeded(
                f"the request would wait for about {wait:.1f} s, but may wait only {longest:.1f} s",
                reason="DEADLINE_TOO_SHORT",
            )

    def latest_start(
        self, now: float, deadline: float | None, service_seconds: float
    ) -> float | None:
        """Returns the latest time at which a request that arrives at `now` may be sent to a
        replica, or None if there is no limit. Times are in seconds on the event loop's clock.
        """
        bounds = []
        if self.max_queue_seconds:
            bounds.append(now + self.max_queue_seconds)
        if deadline is not None:
            bounds.append(now + longest_wait(deadline - now, service_seconds))
        return min(bounds, default=None)


def expected_wait(
    tenant: Tenant, num_ahead: int, others: Iterable[TenantUsage], capacity: Capacity
) -> float:
    """Returns the expected seconds until a sequence is sent to a replica. `num_ahead` sequences of
    the same tenant wait before this sequence.

    The estimate assumes that waiting sequences of other tenants are sent in proportion to the
    tenants' weights, and that tenants without waiting sequences keep their slots.
    """
    num_before, num_kept = float(num_ahead), 0
    for usage in others:
        if usage.num_waiting:
            turns = (num_ahead + 1) * usage.tenant.weight / tenant.weight
            num_before += min(usage.num_waiting, turns)
        else:
            num_kept += usage.num_running
    num_before -= max(0, capacity.num_free)
    share = capacity.num_slots / max(1, capacity.num_slots - num_kept)
    return max(0.0, num_before) * capacity.seconds_per_request * share


def _queue_full(tenant: Tenant, why: str, excess_seconds: float) -> TenantQueueFull:
    return TenantQueueFull(
        f"the queue of tenant {tenant.caller_id} is full: {why}",
        tenant_id=tenant.caller_id,
        quota="queue",
        retry_after_seconds=max(RETRY_AFTER_SECONDS, excess_seconds),
    )


def too_late(deadline: float | None) -> StepwellError:
    """Returns the error of a sequence that was not sent to a replica in time: DeadlineExceeded if
    the client set a deadline, and otherwise ResourceExhausted.
    """
    message = "the request waited in the gateway's queue longer than the time limit"
    if deadline is not None:
        return DeadlineExceeded(message, reason="QUEUE_TIMEOUT")
    return ResourceExhausted(
        message, reason="QUEUE_TIMEOUT", retry_after_seconds=RETRY_AFTER_SECONDS
    )
