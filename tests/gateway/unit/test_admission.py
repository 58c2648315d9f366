"""Sequences of tenants, from their queues at the gateway to the places of the replicas."""

import pytest

from services.common.errors import (
    DeadlineExceeded,
    ResourceExhausted,
    StepwellError,
    Unavailable,
)
from services.common.finish_reason import FinishReason
from services.common.queue_state import QueueState
from services.common.replica_load import ReplicaLoad
from services.gateway.core.admission.capacity import Capacity
from services.gateway.core.admission.places import Use
from services.gateway.core.admission.queue_bounds import TenantQueueFull, expected_wait
from services.gateway.core.admission.wait import WaitReason
from services.gateway.core.delivery import received
from services.gateway.core.delta import Finish
from services.gateway.core.inflight import Inflight, Mailbox
from services.gateway.core.tenant import ANYONE, Tenant
from tests.gateway.fake_fleet import BOUNDS, RESUBMIT_TIMEOUT_SECONDS, FakeFleet

A, B = Tenant("a"), Tenant("b")


def connected(num_places: int = 2, num_replicas: int = 1) -> FakeFleet:
    """A fleet whose replicas run so many sequences each."""
    world = FakeFleet(num_replicas)
    world.connect(*world.replicas, max_num_seqs=num_places)
    return world


def tenants_at(world: FakeFleet, name: str = "a") -> str:
    """The tenants of the sequences that a replica has, in order."""
    return "".join(inflight.request.tenant.tenant_id for inflight in world.has(name))


def schedule_all(world: FakeFleet, name: str = "a") -> None:
    """The replica schedules all sequences that it has."""
    replica = world.replicas[name]
    for inflight in world.has(name):
        replica.admitted(world.handle(replica, inflight), 0)


def finish(world: FakeFleet, inflight: Inflight, name: str = "a") -> None:
    replica = world.replicas[name]
    replica.finished(world.handle(replica, inflight), Finish(FinishReason.STOP))


def finish_first(world: FakeFleet, name: str = "a") -> None:
    """Ends the sequence that came first."""
    finish(world, world.has(name)[0], name)


def moving(world: FakeFleet, seconds_per_request: float, service_seconds: float = 0.0) -> None:
    """The scheduler announces how fast its queue moves, and that none waits there."""
    queue = QueueState(0, 1024, 60.0, seconds_per_request, service_seconds, num_running=2)
    world.replicas["a"].queue_changed(queue)


async def error_of(mailbox: Mailbox) -> StepwellError:
    [(_, delta)] = await received(mailbox)
    assert delta.error is not None
    return delta.error


# Places.


def test_a_tenant_alone_has_all_places_and_one_sequence_ahead() -> None:
    world = connected(num_places=2)
    mailboxes = [world.start(tenant=A) for _ in range(5)]
    assert (tenants_at(world), world.fleet.num_waiting) == ("aaa", 2)
    assert [len(mailbox.routes) for mailbox in mailboxes] == [1, 1, 1, 0, 0]
    finish_first(world)
    assert (tenants_at(world), world.fleet.num_waiting) == ("aaa", 1)


def test_the_next_place_is_for_the_tenant_that_was_served_less() -> None:
    """Another gateway has all places, and leaves one after the other."""
    world = connected(num_places=6)
    for num_others, expected in ((7, ""), (5, "a"), (4, "ab"), (3, "aba"), (2, "abab")):
        world.replicas["a"].load_changed(ReplicaLoad(7, 0, num_other_requests=num_others))
        for tenant in (A, A, A, B, B) if num_others == 7 else ():
            world.start(tenant=tenant)
        assert tenants_at(world) == expected


def test_requests_without_a_tenant_never_wait_here() -> None:
    world = connected(num_places=2)
    for _ in range(10):
        world.start(tenant=ANYONE)
    assert (len(world.has("a")), world.fleet.num_waiting) == (10, 0)


def test_nothing_waits_where_a_replica_does_not_say_how_many_it_runs() -> None:
    world = FakeFleet(1)
    world.connect("a")
    for _ in range(6):
        world.start(tenant=A)
    assert tenants_at(world) == "aaaaaa"


def test_requests_of_other_gateways_take_places() -> None:
    world = connected(num_places=4)
    world.replicas["a"].load_changed(ReplicaLoad(3, 0, num_other_requests=3))
    world.start(tenant=B).close()
    world.start(tenant=A)
    world.start(tenant=A)
    assert (tenants_at(world), world.fleet.num_waiting) == ("a", 1)
    world.replicas["a"].load_changed(ReplicaLoad(2, 0, num_other_requests=1))
    assert (tenants_at(world), world.fleet.num_waiting) == ("aa", 0)


def test_where_blocks_are_missing_few_wait_at_the_replica() -> None:
    """Two reports in a row say so."""
    world = connected(num_places=8)
    blocked = QueueState(4, 1024, 60.0, num_running=3, is_blocked=True)
    world.replicas["a"].queue_changed(blocked)
    assert world.replicas["a"].num_places == 8, "it may have been a burst of prompts"
    world.replicas["a"].queue_changed(blocked)
    assert world.replicas["a"].num_places == 5
    world.replicas["a"].queue_changed(QueueState(0, 1024, 60.0, num_running=3))
    assert world.replicas["a"].num_places == 8


def test_requests_that_wait_at_a_replica_for_its_next_step_take_no_places_away() -> None:
    """Steps that take longer than reports are apart show the same ones in each."""
    world = connected(num_places=8)
    for _ in range(3):
        world.replicas["a"].queue_changed(QueueState(4, 1024, 60.0, num_running=3))
    assert world.replicas["a"].num_places == 8


def test_of_several_replicas_one_with_a_free_place_is_chosen() -> None:
    world = connected(num_places=2, num_replicas=2)
    world.replicas["a"].load_changed(ReplicaLoad(2, 0, num_other_requests=2))
    world.replicas["b"].load_changed(ReplicaLoad(1, 0, num_other_requests=1))
    world.start(tenant=A)
    assert (tenants_at(world, "a"), tenants_at(world, "b")) == ("", "a")


def test_answers_to_one_prompt_follow_each_other_to_one_replica() -> None:
    world = connected(num_places=4, num_replicas=2)
    world.start(tenant=A, num_prompts=2, n=3)
    for name in "ab":
        prompts = {tuple(inflight.request.prompt_token_ids) for inflight in world.has(name)}
        assert (len(world.has(name)), len(prompts)) == (3, 1)


# Places that are given back.


def flooded(num_running: int = 4) -> tuple[FakeFleet, list[Mailbox]]:
    """A has all places of a replica, with one sequence ahead, and two wait."""
    world = connected(num_places=num_running)
    mailboxes = [world.start(tenant=A) for _ in range(num_running + 3)]
    assert (tenants_at(world), world.fleet.num_waiting) == ("a" * (num_running + 1), 2)
    schedule_all(world)
    return world, mailboxes


def test_a_tenant_below_its_share_has_a_place_at_once() -> None:
    world, mailboxes = flooded(num_running=4)
    quiet = [world.start(tenant=B) for _ in range(3)]
    assert tenants_at(world) == "aabb", "each has two of the four"
    assert [len(mailbox.waits) for mailbox in quiet] == [0, 0, 0]
    assert world.links["a"].aborted == [5, 4, 3], "those that came last, and no more than needed"
    assert world.fleet.admission.places.num_waiting(A) == 5
    assert [one.mailbox for one in world.has("a")[:2]] == mailboxes[:2]


def test_a_sequence_that_was_taken_back_goes_on_before_those_that_came_later() -> None:
    world, mailboxes = flooded(num_running=2)
    for number, inflight in enumerate(world.has("a")):
        inflight.tokens([7, number])
    world.start(tenant=B)
    assert tenants_at(world) == "ab"
    world.clock.advance(BOUNDS.max_queue_seconds - 1.0)
    finish_first(world)
    [again] = [one for one in world.has("a") if one.request.tenant is A]
    assert (again.mailbox, again.output_token_ids) == (mailboxes[1], [7, 1])
    [wait] = again.mailbox.waits
    assert (wait.reason, wait.seconds) == (WaitReason.PREEMPTED, BOUNDS.max_queue_seconds - 1.0)
    assert len(again.mailbox.routes) == 2


async def test_a_sequence_that_was_taken_back_may_wait_for_any_time() -> None:
    world, mailboxes = flooded(num_running=2)
    world.start(tenant=B)
    world.clock.advance(BOUNDS.max_queue_seconds + 1.0)
    assert [(await error_of(mailbox)).error_reason for mailbox in mailboxes[3:]] == [
        "QUEUE_TIMEOUT"
    ] * 2
    assert world.fleet.num_waiting == 2
    finish_first(world)
    finish(world, world.has("a")[0])
    assert [one.mailbox for one in world.has("a")] == mailboxes[1:3]


def test_the_sequence_that_was_taken_back_least_often_is_taken_back_next() -> None:
    world, mailboxes = flooded(num_running=4)
    for mailbox in mailboxes[4:]:
        mailbox.close()
    for _ in range(2):
        world.start(tenant=B).close()
    taken = [mailbox.inflights[0].num_times_taken_back for mailbox in mailboxes[:4]]
    assert taken == [0, 0, 1, 1], "the last one, and then the one before it"


def test_of_a_tenants_sequences_those_that_may_run_latest_are_taken_back() -> None:
    world = connected(num_places=4)
    for priority in (0, 5, 5, 0):
        world.start(tenant=A, priority=priority)
    world.start(tenant=B)
    world.start(tenant=B)
    assert world.links["a"].aborted == [3, 2]


def test_what_a_sequence_cost_until_it_was_taken_back_is_charged() -> None:
    """It got 3 of 50 tokens: the rest is charged when it goes on."""
    world = connected(num_places=2)
    for _ in range(2):
        world.start(tenant=A, max_tokens=50)
    for inflight in world.has("a"):
        inflight.tokens([1, 2, 3])
    queue = world.fleet.admission
    use = queue.places.of(A)
    assert (use.num_running, use.num_waiting) == (2, 0)
    world.start(tenant=B)
    assert (use.num_running, use.num_waiting) == (1, 1)
    assert use.mean_output_tokens == 128.0, "no answer has ended"
    finish_first(world)
    assert (use.num_running, use.num_waiting) == (1, 0)


def test_a_tenant_with_its_share_waits_for_one_of_its_own_to_end() -> None:
    world, _ = flooded(num_running=4)
    own = [world.start(tenant=B) for _ in range(3)]
    assert [len(mailbox.routes) for mailbox in own] == [1, 1, 0]
    finish(world, own[0].inflights[0])
    assert [len(mailbox.routes) for mailbox in own] == [1, 1, 1]


# Sequences that start.


def test_of_a_flood_few_prompts_are_computed_at_once() -> None:
    """Of 8 places each tenant has 4, and two sequences of it start at once."""
    world = connected(num_places=8)
    world.start(tenant=B).close()
    mailboxes = [world.start(tenant=A) for _ in range(6)]
    replica = world.replicas["a"]
    assert [len(mailbox.routes) for mailbox in mailboxes] == [1, 1, 0, 0, 0, 0]
    world.start(tenant=B)
    assert tenants_at(world) == "aab", "another one does not wait for them"
    replica.admitted(world.handle(replica, mailboxes[0].inflights[0]), 0)
    assert tenants_at(world) == "aaba"
    finish(world, mailboxes[1].inflights[0])
    mailboxes[2].close()
    assert [len(mailbox.routes) for mailbox in mailboxes] == [1, 1, 1, 1, 1, 0]
    assert world.fleet.admission.places.of(A).num_starting == 2


# Order.


def test_sequences_of_a_tenant_go_by_priority_and_then_in_order_of_arrival() -> None:
    world = connected(num_places=1)
    world.start(tenant=A)
    world.start(tenant=A)
    later = [world.start(tenant=A, priority=priority) for priority in (0, 5, -5, 0)]
    order = []
    for _ in range(4):
        finish_first(world)
        order.append(
            next(i for i, mailbox in enumerate(later) if mailbox.inflights[0] is world.has("a")[-1])
        )
    assert order == [2, 0, 3, 1]


def test_what_answers_became_shorter_than_expected_is_given_back() -> None:
    """Both have asked for as much, but one gets a single token each time, and so is next again."""
    world = connected(num_places=2)
    for tenant in (A, B) * 4:
        world.start(tenant=tenant, max_tokens=50)
    for _ in range(3):
        assert sorted(tenants_at(world)) == ["a", "b"]
        (short,) = [one for one in world.has("a") if one.request.tenant is B]
        short.tokens([1])
        finish(world, short)
    assert tenants_at(world) == "ab"


# Waiting.


def test_a_wait_says_for_what_and_for_how_long() -> None:
    world = connected(num_places=16)
    mailboxes = [world.start(tenant=A) for _ in range(15)]
    schedule_all(world)
    world.start(tenant=B).close()
    share = world.start(tenant=A)
    turn = world.start(tenant=A)
    world.clock.advance(2.0)
    for mailbox in mailboxes[:2]:
        finish(world, mailbox.inflights[0])
    [wait] = share.waits
    assert (wait.reason, wait.seconds, wait.num_ahead) == (WaitReason.SHARE, 2.0, 0)
    [wait] = turn.waits
    assert (wait.reason, wait.num_ahead) == (WaitReason.TURN, 1)
    assert mailboxes[0].waits == []


def test_a_sequence_that_is_aborted_while_it_waits_is_never_sent() -> None:
    world = connected(num_places=1)
    first, _, third = (world.start(tenant=A) for _ in range(3))
    third.close()
    assert world.fleet.num_waiting == 0
    first.close()
    finish_first(world)
    assert tenants_at(world) == ""


async def test_a_wait_ends_after_the_time_that_is_allowed_for_it() -> None:
    world = connected(num_places=1)
    patient, hasty = (
        [world.start(tenant=A) for _ in range(3)][-1],
        world.start(tenant=A, deadline=5.0),
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
    """How many wait after each of so many calls of the clock."""
    numbers = []
    for _ in range(num_calls):
        world.clock.next_call()
        numbers.append(world.fleet.num_waiting)
    return numbers


def test_of_those_that_are_too_late_together_two_end_in_a_turn() -> None:
    world = connected(num_places=1)
    for _ in range(2):
        world.start(tenant=A)
    for _ in range(5):
        world.start(tenant=A, deadline=5.0)
    while world.fleet.num_waiting == 5:
        world.clock.next_call()
    assert [world.fleet.num_waiting, *numbers_waiting(world, 2)] == [3, 1, 0]


def test_those_that_are_too_late_when_places_become_free_end_two_in_a_turn() -> None:
    world = connected(num_places=1)
    moving(world, seconds_per_request=0.1, service_seconds=0.5)
    first, _ = (world.start(tenant=A) for _ in range(2))
    for _ in range(3):
        world.start(tenant=A, deadline=10.0)
    last = world.start(tenant=A)
    world.clock.advance(5.5)
    slower = QueueState(0, 1024, 60.0, seconds_per_request=4.0, service_seconds=4.6, num_running=2)
    world.replicas["a"].queue = slower
    finish(world, first.inflights[0])
    assert [world.fleet.num_waiting, *numbers_waiting(world, 1)] == [2, 0]
    assert last.routes, "the place was not lost to those that were too late"


async def test_a_sequence_that_can_no_longer_be_done_by_its_deadline_is_not_sent() -> None:
    """When it came, sequences ran for less than a second; now they run for four."""
    world = connected(num_places=1)
    moving(world, seconds_per_request=0.1, service_seconds=0.5)
    first, _, third = (world.start(tenant=A, deadline=10.0) for _ in range(3))
    world.clock.advance(5.5)
    world.replicas["a"].queue_changed(
        QueueState(0, 1024, 60.0, seconds_per_request=4.0, service_seconds=4.6, num_running=2)
    )
    finish(world, first.inflights[0])
    error = await error_of(third)
    assert (type(error), error.error_reason) == (DeadlineExceeded, "QUEUE_TIMEOUT")
    assert third.routes == []


async def test_without_a_replica_sequences_wait_for_one_and_then_for_a_place() -> None:
    world = connected(num_places=1)
    world.replicas["a"].closed("killed")
    mailboxes = [world.start(tenant=A) for _ in range(4)]
    world.clock.advance(RESUBMIT_TIMEOUT_SECONDS / 2)
    world.connect("a", max_num_seqs=1)
    assert (len(world.has("a")), world.fleet.num_waiting) == (2, 2)
    for mailbox in mailboxes[:2]:
        finish(world, mailbox.inflights[0])
    assert [one.mailbox for one in world.has("a")] == mailboxes[2:]


async def test_a_sequence_that_was_lost_does_not_wait_again() -> None:
    world = connected(num_places=1, num_replicas=2)
    for _ in range(4):
        world.start(tenant=A)
    assert (len(world.has("a")) + len(world.has("b")), world.fleet.num_waiting) == (3, 1)
    assert world.has("a")
    world.replicas["a"].closed("killed")
    assert len(world.has("b")) == 3, "none of those that ran waits for a place"
    for _ in range(3):
        finish_first(world, "b")
    assert len(world.has("b")) == 1
    finish_first(world, "b")
    assert world.fleet.admission.places.of(A).num_running == 0


async def test_all_that_waits_ends_when_the_gateway_gives_up() -> None:
    world = connected(num_places=1)
    mailboxes = [world.start(tenant=A) for _ in range(4)]
    gone = Unavailable("the server is shutting down")
    world.fleet.give_up(gone)
    assert [await error_of(mailbox) for mailbox in mailboxes] == [gone] * 4
    assert (tenants_at(world), world.fleet.num_waiting) == ("", 0)


# Refusals.


async def test_a_tenants_queue_is_bounded_in_number() -> None:
    world = connected(num_places=1)
    for _ in range(2 + BOUNDS.max_num_waiting):
        world.fleet.check_room(A, None)
        world.start(tenant=A)
    with pytest.raises(TenantQueueFull, match="6 of its requests wait already") as refused:
        world.fleet.check_room(A, None)
    assert (refused.value.tenant_id, refused.value.retry_after_seconds) == ("a", 1.0)
    world.fleet.check_room(B, None)
    assert isinstance(await error_of(world.start(tenant=A)), TenantQueueFull)


def test_requests_that_are_still_read_count_as_waiting() -> None:
    world = connected(num_places=1)
    for _ in range(2):
        world.start(tenant=A)
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
    assert world.fleet.admission.arrivals.num(A) == 0


def test_a_request_that_cannot_be_done_by_its_deadline_is_refused_at_once() -> None:
    world = connected(num_places=2)
    for _ in range(3):
        world.start(tenant=A)
    for _ in range(4):
        world.start(tenant=A)
    moving(world, seconds_per_request=0.5, service_seconds=1.0)
    world.fleet.check_room(A, 3.1)
    with pytest.raises(DeadlineExceeded) as refused:
        world.fleet.check_room(A, 2.9)
    assert refused.value.message == "the request would wait for about 2.0 s, and may for 1.9 s"
    world.fleet.check_room(B, 2.9)


def test_a_request_that_would_wait_too_long_is_refused_with_the_time_that_is_too_much() -> None:
    world = connected(num_places=2)
    for _ in range(7):
        world.start(tenant=A)
    moving(world, seconds_per_request=6.0)
    with pytest.raises(TenantQueueFull, match=r"would wait for about 24\.0 s") as refused:
        world.fleet.check_room(A, None)
    assert refused.value.retry_after_seconds == 4.0


def test_requests_that_are_read_count_as_queued_where_there_are_no_tenants_too() -> None:
    world = connected(num_places=2)
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


# Estimates.


def test_a_tenant_expects_to_wait_for_its_own_and_for_others_turns() -> None:
    capacity = Capacity(num_places=10, num_free=0, seconds_per_request=0.1)
    assert expected_wait(A, 4, [], capacity) == pytest.approx(0.4)
    few = [Use(B, num_waiting=2)]
    assert expected_wait(A, 4, few, capacity) == pytest.approx(0.6)
    many = [Use(Tenant("b", weight=2.0), num_waiting=100)]
    assert expected_wait(A, 4, many, capacity) == pytest.approx(1.4)
    served = [Use(B, num_running=5)]
    assert expected_wait(A, 4, served, capacity) == pytest.approx(0.8), "half of the places move"
    free = Capacity(num_places=10, num_free=3, seconds_per_request=0.1)
    assert expected_wait(A, 4, [], free) == pytest.approx(0.1)
    assert expected_wait(A, 0, [], free) == 0.0
