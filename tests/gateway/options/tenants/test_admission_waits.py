"""Sequences of tenants wait at the gateway. Their number and their waiting time are limited."""

import pytest

from services.common.errors import DeadlineExceeded, ResourceExhausted, Unavailable
from services.common.replica.queue_state import QueueState
from services.common.telemetry.time_parts import WAITS_FOR
from services.gateway.core.caller import ANYONE
from services.gateway.options.tenants.core.queues.capacity import Capacity
from services.gateway.options.tenants.core.queues.queue_bounds import TenantQueueFull, expected_wait
from services.gateway.options.tenants.core.queues.slots import TenantUsage
from services.gateway.options.tenants.core.queues.waiter import WaitReason
from services.gateway.options.tenants.core.tenant import Tenant
from tests.gateway.fake_fleet import RESUBMIT_TIMEOUT_SECONDS, FakeFleet, error_of
from tests.gateway.options.tenants.tenant_fleet import (
    BOUNDS,
    A,
    B,
    connected,
    finish,
    finish_first,
    moving,
    queues_of,
    schedule_all,
    tenants_at,
)

# Sequences that wait.


def test_a_wait_says_for_what_and_for_how_long() -> None:
    world = connected(num_slots=16)
    mailboxes = [world.start(caller=A) for _ in range(15)]
    schedule_all(world)
    world.start(caller=B).close()
    share = world.start(caller=A)
    turn = world.start(caller=A)
    world.clock.advance(2.0)
    for mailbox in mailboxes[:2]:
        finish(world, mailbox.inflights[0])
    [wait] = share.waits
    assert (wait.reason, wait.seconds, wait.num_ahead) == (WaitReason.SHARE, 2.0, 0)
    [wait] = turn.waits
    assert (wait.reason, wait.num_ahead) == (WaitReason.TURN, 1)
    assert mailboxes[0].waits == []


def test_a_sequence_that_is_aborted_while_it_waits_is_never_sent() -> None:
    world = connected(num_slots=1)
    first, _, third = (world.start(caller=A) for _ in range(3))
    third.close()
    assert world.fleet.num_waiting == 0
    first.close()
    finish_first(world)
    assert tenants_at(world) == ""


async def test_a_wait_ends_after_the_time_that_is_allowed_for_it() -> None:
    world = connected(num_slots=1)
    patient, hasty = (
        [world.start(caller=A) for _ in range(3)][-1],
        world.start(caller=A, deadline=5.0),
    )
    world.clock.advance(5.2)
    error = await error_of(hasty)
    assert isinstance(error, DeadlineExceeded)
    assert error.error_reason == "QUEUE_TIMEOUT"
    world.clock.advance(BOUNDS.max_queue_seconds - 5.0)
    error = await error_of(patient)
    assert isinstance(error, ResourceExhausted)
    assert (error.error_reason, error.retry_after_seconds) == ("QUEUE_TIMEOUT", 1.0)
    assert world.fleet.num_waiting == 0


def numbers_waiting(world: FakeFleet, num_calls: int) -> list[int]:
    numbers = []
    for _ in range(num_calls):
        world.clock.next_call()
        numbers.append(world.fleet.num_waiting)
    return numbers


def test_of_those_that_are_too_late_together_two_end_in_a_turn() -> None:
    world = connected(num_slots=1)
    for _ in range(2):
        world.start(caller=A)
    for _ in range(5):
        world.start(caller=A, deadline=5.0)
    while world.fleet.num_waiting == 5:
        world.clock.next_call()
    assert [world.fleet.num_waiting, *numbers_waiting(world, 2)] == [3, 1, 0]


def test_those_that_are_too_late_when_slots_become_free_end_two_in_a_turn() -> None:
    world = connected(num_slots=1)
    moving(world, seconds_per_request=0.1, service_seconds=0.5)
    first, _ = (world.start(caller=A) for _ in range(2))
    for _ in range(3):
        world.start(caller=A, deadline=10.0)
    last = world.start(caller=A)
    world.clock.advance(5.5)
    slower = QueueState(0, 1024, 60.0, seconds_per_request=4.0, service_seconds=4.6, num_running=2)
    world.replicas["a"].queue = slower
    finish(world, first.inflights[0])
    assert [world.fleet.num_waiting, *numbers_waiting(world, 1)] == [2, 0]
    assert last.routes, "the slot was not lost to those that were too late"


async def test_a_sequence_that_can_no_longer_be_done_by_its_deadline_is_not_sent() -> None:
    """Sequences took half a second when the sequence arrived. Now they take 4.6 s."""
    world = connected(num_slots=1)
    moving(world, seconds_per_request=0.1, service_seconds=0.5)
    first, _, third = (world.start(caller=A, deadline=10.0) for _ in range(3))
    world.clock.advance(5.5)
    world.replicas["a"].queue_changed(
        QueueState(0, 1024, 60.0, seconds_per_request=4.0, service_seconds=4.6, num_running=2)
    )
    finish(world, first.inflights[0])
    error = await error_of(third)
    assert (type(error), error.error_reason) == (DeadlineExceeded, "QUEUE_TIMEOUT")
    assert third.routes == []


async def test_without_a_replica_sequences_wait_for_one_and_then_for_a_slot() -> None:
    world = connected(num_slots=1)
    world.replicas["a"].closed("killed")
    mailboxes = [world.start(caller=A) for _ in range(4)]
    world.clock.advance(RESUBMIT_TIMEOUT_SECONDS / 2)
    world.connect("a", max_num_seqs=1)
    assert (len(world.has("a")), world.fleet.num_waiting) == (2, 2)
    for mailbox in mailboxes[:2]:
        finish(world, mailbox.inflights[0])
    assert [one.mailbox for one in world.has("a")] == mailboxes[2:]


async def test_a_sequence_that_was_lost_does_not_wait_again() -> None:
    world = connected(num_slots=1, num_replicas=2)
    for _ in range(4):
        world.start(caller=A)
    assert (len(world.has("a")) + len(world.has("b")), world.fleet.num_waiting) == (3, 1)
    assert world.has("a")
    world.replicas["a"].closed("killed")
    assert len(world.has("b")) == 3, "none of those that ran waits for a slot"
    for _ in range(3):
        finish_first(world, "b")
    assert len(world.has("b")) == 1
    finish_first(world, "b")
    assert queues_of(world.fleet).slots.usage(A).num_running == 0


async def test_all_that_waits_ends_when_the_gateway_gives_up() -> None:
    world = connected(num_slots=1)
    mailboxes = [world.start(caller=A) for _ in range(4)]
    gone = Unavailable("the server is shutting down")
    world.fleet.give_up(gone)
    assert [await error_of(mailbox) for mailbox in mailboxes] == [gone] * 4
    assert (tenants_at(world), world.fleet.num_waiting) == ("", 0)


# Sequences that are refused.


async def test_a_tenants_queue_is_bounded_in_number() -> None:
    world = connected(num_slots=1)
    for _ in range(2 + BOUNDS.max_num_waiting):
        world.fleet.check_room(A, None)
        world.start(caller=A)
    with pytest.raises(TenantQueueFull, match="6 of its requests are waiting") as refused:
        world.fleet.check_room(A, None)
    assert (refused.value.tenant_id, refused.value.retry_after_seconds) == ("a", 1.0)
    world.fleet.check_room(B, None)
    assert isinstance(await error_of(world.start(caller=A)), TenantQueueFull)


def test_requests_that_are_still_read_count_as_waiting() -> None:
    world = connected(num_slots=1)
    for _ in range(2):
        world.start(caller=A)
    arrivals = [world.fleet.arriving(A, None) for _ in range(BOUNDS.max_num_waiting)]
    entered = [arriving.__enter__() for arriving in arrivals]
    with pytest.raises(TenantQueueFull):
        world.fleet.check_room(A, None)
    world.fleet.check_room(B, None)
    entered[0].end()
    entered[0].end()
    world.fleet.check_room(A, None)
    for arriving in arrivals:
        arriving.__exit__(None, None, None)
    assert world.fleet.arrivals.num(A) == 0


def test_a_request_that_cannot_be_done_by_its_deadline_is_refused_at_once() -> None:
    world = connected(num_slots=2)
    for _ in range(3):
        world.start(caller=A)
    for _ in range(4):
        world.start(caller=A)
    moving(world, seconds_per_request=0.5, service_seconds=1.0)
    world.fleet.check_room(A, 3.1)
    with pytest.raises(DeadlineExceeded) as refused:
        world.fleet.check_room(A, 2.9)
    assert (
        refused.value.message == "the request would wait for about 2.0 s, but may wait only 1.9 s"
    )
    world.fleet.check_room(B, 2.9)


def test_a_request_that_would_wait_too_long_is_refused_with_the_time_that_is_too_much() -> None:
    world = connected(num_slots=2)
    for _ in range(7):
        world.start(caller=A)
    moving(world, seconds_per_request=6.0)
    with pytest.raises(TenantQueueFull, match=r"would wait for about 24\.0 s") as refused:
        world.fleet.check_room(A, None)
    assert refused.value.retry_after_seconds == 4.0


def test_requests_that_are_read_count_as_queued_where_there_are_no_tenants_too() -> None:
    world = connected(num_slots=2)
    world.replicas["a"].queue_changed(QueueState(0, 3, 0.0, num_running=0))
    with world.fleet.arriving(ANYONE, None), world.fleet.arriving(ANYONE, None):
        for _ in range(2):
            world.start()
        world.fleet.check_room(ANYONE, None)
        with (
            world.fleet.arriving(ANYONE, None),
            pytest.raises(ResourceExhausted, match="3 requests"),
        ):
            world.fleet.check_room(ANYONE, None)


# Estimated waiting times.


def test_a_tenant_expects_to_wait_for_its_own_and_for_others_turns() -> None:
    capacity = Capacity(num_slots=10, num_free=0, seconds_per_request=0.1)
    assert expected_wait(A, 4, [], capacity) == pytest.approx(0.4)
    few = [TenantUsage(B, num_waiting=2)]
    assert expected_wait(A, 4, few, capacity) == pytest.approx(0.6)
    many = [TenantUsage(Tenant("b", weight=2.0), num_waiting=100)]
    assert expected_wait(A, 4, many, capacity) == pytest.approx(1.4)
    served = [TenantUsage(B, num_running=5)]
    assert expected_wait(A, 4, served, capacity) == pytest.approx(0.8), "half of the slots move"
    free = Capacity(num_slots=10, num_free=3, seconds_per_request=0.1)
    assert expected_wait(A, 4, [], free) == pytest.approx(0.1)
    assert expected_wait(A, 0, [], free) == 0.0


def test_every_wait_reason_has_an_explanation_in_displays() -> None:
    assert WAITS_FOR.keys() >= set(WaitReason)
