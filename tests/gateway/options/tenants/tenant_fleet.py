"""A fake fleet in which each tenant's sequences wait in a queue of their own."""

from services.common.replica.queue_state import QueueState
from services.common.request.finish import Finish, FinishReason
from services.gateway.core.fleet.fleet import Fleet
from services.gateway.core.request.inflight import Inflight
from services.gateway.options.tenants.core.queues.capacity import capacity_of
from services.gateway.options.tenants.core.queues.queue_bounds import QueueBounds
from services.gateway.options.tenants.core.queues.tenant_queues import TenantQueues
from services.gateway.options.tenants.core.tenant import Tenant
from tests.gateway.fake_fleet import FakeFleet

A, B = Tenant("a"), Tenant("b")
BOUNDS = QueueBounds(max_num_waiting=6, max_total_waiting=100, max_queue_seconds=20.0)


def with_queues(world: FakeFleet) -> FakeFleet:
    fleet = world.fleet
    fleet.admission = TenantQueues(
        world.clock,
        BOUNDS,
        fleet.arrivals,
        capacity=lambda: capacity_of(fleet.membership.ready()),
        send=fleet.send,
    )
    return world


def queues_of(fleet: Fleet) -> TenantQueues:
    assert isinstance(fleet.admission, TenantQueues)
    return fleet.admission


def num_waiting(fleet: Fleet, tenant: str) -> int:
    return queues_of(fleet).slots.num_waiting(Tenant(tenant))


def connected(num_slots: int = 2, num_replicas: int = 1) -> FakeFleet:
    """A fleet of connected replicas that each run `num_slots` sequences at once."""
    world = with_queues(FakeFleet(num_replicas))
    world.connect(*world.replicas, max_num_seqs=num_slots)
    return world


def tenants_at(world: FakeFleet, name: str = "a") -> str:
    return "".join(inflight.request.caller.caller_id for inflight in world.has(name))


def schedule_all(world: FakeFleet) -> None:
    replica = world.replicas["a"]
    for inflight in world.has("a"):
        replica.admitted(world.handle(replica, inflight), 0)


def finish(world: FakeFleet, inflight: Inflight, name: str = "a") -> None:
    replica = world.replicas[name]
    replica.finished(world.handle(replica, inflight), Finish(FinishReason.STOP))


def finish_first(world: FakeFleet, name: str = "a") -> None:
    finish(world, world.has(name)[0], name)


def moving(world: FakeFleet, seconds_per_request: float, service_seconds: float = 0.0) -> None:
    """Makes the scheduler of replica "a" report an empty queue and its speed."""
    queue = QueueState(0, 1024, 60.0, seconds_per_request, service_seconds, num_running=2)
    world.replicas["a"].queue_changed(queue)
