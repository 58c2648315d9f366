"""The measured duration of sequences determines how long a sequence with a deadline may wait."""

import pytest

from services.common.errors import DeadlineExceeded
from services.common.replica.queue_state import QueueState
from services.common.request.finish import Finish, FinishReason
from services.gateway.options.tenants.core.queues.service_charge import ServiceTime
from services.gateway.options.tenants.core.tenant import Tenant
from tests.gateway.fake_fleet import FakeFleet
from tests.gateway.options.tenants.tenant_fleet import A, B, queues_of, with_queues


def test_what_usually_takes_as_long_leaves_no_margin_in_the_end() -> None:
    times = ServiceTime()
    assert times.longest_usual == 0.0
    times.add(2.0)
    assert times.longest_usual == 4.0, "one says nothing of how far others are from it"
    for _ in range(30):
        times.add(2.0)
    assert times.longest_usual == pytest.approx(2.0, rel=0.01)


def test_what_varies_leaves_twice_its_mean_deviation() -> None:
    times = ServiceTime()
    for _ in range(100):
        for seconds in (1.0, 3.0):
            times.add(seconds)
    assert times.mean == pytest.approx(2.0, rel=0.1)
    assert times.longest_usual == pytest.approx(4.0, rel=0.1)


class World:
    def __init__(self) -> None:
        self.fake = with_queues(FakeFleet(1))
        self.fake.connect(*self.fake.replicas, max_num_seqs=2)
        self.replica = self.fake.replicas["a"]
        # The scheduler reports that each request takes 1 s, and that one ends every 0.5 s.
        self.replica.queue_changed(QueueState(0, 1024, 60.0, 0.5, 1.0, num_running=2))

    def serve(self, seconds: float, num_tokens: int = 1, tenant: Tenant = A) -> None:
        """Sends a request that ends after `seconds`. If `num_tokens` is 0, its client leaves."""
        mailbox = self.fake.start(max_tokens=1, caller=tenant)
        (inflight,) = mailbox.inflights
        handle = self.fake.handle(self.replica, inflight)
        self.replica.admitted(handle, 0)
        self.fake.clock.advance(seconds)
        if num_tokens:
            inflight.tokens([7] * num_tokens)
            self.replica.finished(handle, Finish(FinishReason.LENGTH))
        else:
            mailbox.close()

    def fill(self, num_waiting: int) -> None:
        """Fills all slots, so that `num_waiting` sequences wait. One can start every 0.5 s."""
        for _ in range(3 + num_waiting):
            self.fake.start(caller=A)

    def check(self, timeout_seconds: float, tenant: Tenant = A) -> None:
        self.fake.fleet.check_room(tenant, self.fake.clock.time() + timeout_seconds)


def test_a_deadline_leaves_time_for_a_request_that_takes_as_long_as_few_do() -> None:
    """The scheduler's mean is 1 s, but a request takes 3.5 s. If the gateway used the mean, it
    would accept the request although the request cannot meet its deadline.
    """
    world = World()
    for _ in range(20):
        for seconds in (0.5, 3.5):
            world.serve(seconds)
    world.fill(4)
    with pytest.raises(DeadlineExceeded, match=r"about 2\.0 s, but may wait only 1\.9 s"):
        world.check(3.8)
    world.check(4.2)
    world.check(3.8, tenant=B)


def test_requests_whose_clients_leave_early_say_nothing_of_the_time() -> None:
    world = World()
    for _ in range(20):
        world.serve(1.0)
    for _ in range(20):
        world.serve(0.01, num_tokens=0)
    assert queues_of(world.fake.fleet).slots.service_time(A).mean == pytest.approx(1.0)


def test_requests_that_miss_their_deadlines_say_that_it_takes_longer() -> None:
    """If these requests did not count, the measured durations would be too short."""
    world = World()
    for _ in range(20):
        world.serve(1.0)
    for _ in range(20):
        world.serve(3.0, num_tokens=0)
    assert queues_of(world.fake.fleet).slots.service_time(A).longest_usual > 2.0
