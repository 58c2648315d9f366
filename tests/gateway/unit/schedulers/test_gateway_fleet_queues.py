"""The fleet chooses another replica if a scheduler refuses a sequence, or would refuse it according
to the last reported state of its queue.
"""

import gc
import weakref

import pytest
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.errors import (
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    StepwellError,
    Unavailable,
)
from services.common.replica.queue_state import QueueState
from services.gateway.adapters.schedulers.session.deltas import SessionDeltas
from services.gateway.core.caller import ANYONE, Caller
from services.gateway.core.fleet.replica_description import ReplicaState
from tests.gateway.fake_fleet import (
    LIMITS,
    RESUBMIT_TIMEOUT_SECONDS,
    FakeFleet,
    error_of,
    only_delta,
)

FULL = ResourceExhausted("full", reason="QUEUE_FULL", retry_after_seconds=0.5)
DRAINING = Unavailable("draining", retry_after_seconds=0.5)


# Sequences that a scheduler refuses.


def reject(world: FakeFleet, error: StepwellError) -> str:
    """Makes its replica refuse the request's only sequence. Returns the replica's name."""
    (name,) = (name for name in world.links if world.has(name))
    (handle,) = world.replicas[name].running
    world.replicas[name].rejected(handle, error)
    return name


async def test_a_refused_sequence_is_sent_to_each_other_replica_once() -> None:
    world = FakeFleet(3)
    world.connect("a", "b", "c")
    mailbox = world.start()
    assert {reject(world, FULL) for _ in range(3)} == {"a", "b", "c"}
    assert await error_of(mailbox) is FULL


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_sequence_that_leaves_its_replica_is_sent_to_one_that_refused_it_before(
    is_lost: bool,
) -> None:
    world = FakeFleet(2)
    world.connect("a", "b")
    world.start()
    first = reject(world, FULL)
    (second,) = {"a", "b"} - {first}
    if is_lost:
        world.replicas[second].closed("killed")
    else:
        world.replicas[second].state_changed(ReplicaState(ready=False, reason="no worker"))
        world.clock.advance(1.1)
    assert len(world.has(first)) == 1


def test_a_sequence_waits_where_every_scheduler_drains() -> None:
    world = FakeFleet(1)
    world.connect("a")
    world.start()
    reject(world, DRAINING)
    assert world.fleet.num_waiting == 1
    world.clock.advance(0.5)
    assert len(world.has("a")) == 1, "it is tried again when the scheduler said"


async def test_a_sequence_that_was_accepted_before_waits_where_all_queues_are_full() -> None:
    world = FakeFleet(1)
    world.connect("a")
    mailbox = world.start()
    world.replicas["a"].admitted(next(iter(world.replicas["a"].running)), 0)
    world.replicas["a"].closed("killed")
    world.connect("a")
    for _ in range(3):
        reject(world, FULL)
        assert world.fleet.num_waiting == 1
        world.clock.advance(0.5)
        assert len(world.has("a")) == 1
    reject(world, FULL)
    world.replicas["a"].state_changed(ReplicaState(ready=False, reason="no worker"))
    world.clock.advance(RESUBMIT_TIMEOUT_SECONDS)
    await only_delta(mailbox)  # the sequence was admitted
    assert world.fleet.num_waiting == 0, "its time began with the loss"


async def test_what_is_wrong_with_a_request_is_wrong_everywhere() -> None:
    world = FakeFleet(2)
    world.connect("a", "b")
    mailbox = world.start()
    wrong = InvalidArgument("wrong")
    refused_by = reject(world, wrong)
    assert reject(world, wrong) != refused_by, "it may have changed on its way: it is sent again"
    assert await error_of(mailbox) is wrong
    assert not world.has("a")
    assert not world.has("b")


# The state of queues.


def queue(num_waiting: int, seconds_per_request: float = 0.0) -> QueueState:
    return QueueState(num_waiting, 4, 0.0, seconds_per_request)


def test_there_is_room_while_one_replica_takes_requests() -> None:
    world = FakeFleet(2)
    world.connect("a", "b")
    world.fleet.check_room(ANYONE, None)
    world.replicas["a"].queue_changed(queue(4))
    world.fleet.check_room(ANYONE, None)
    world.replicas["b"].queue_changed(queue(4))
    with pytest.raises(ResourceExhausted, match="queue is full: 4 requests are waiting"):
        world.fleet.check_room(ANYONE, None)
    world.replicas["b"].closed("killed")
    with pytest.raises(ResourceExhausted):
        world.fleet.check_room(ANYONE, None)
    world.replicas["a"].closed("killed")
    world.fleet.check_room(ANYONE, None)  # without any replica, requests wait


def test_a_refusal_is_freed_without_a_search_for_garbage() -> None:
    world = FakeFleet(1)
    world.connect("a")
    world.replicas["a"].queue_changed(queue(4))
    gc.disable()
    try:
        try:
            world.fleet.check_room(ANYONE, None)
        except ResourceExhausted as error:
            refusal = weakref.ref(error)
        assert refusal() is None
    finally:
        gc.enable()


def test_a_replica_whose_queue_has_room_is_preferred() -> None:
    world = FakeFleet(2)
    world.connect("a", "b")
    world.replicas["b"].queue_changed(queue(2))
    for _ in range(2):
        world.replicas["a"].queue_changed(queue(4))
        world.start()
    assert (len(world.has("a")), len(world.has("b"))) == (0, 2)
    world.start()
    assert (len(world.has("a")), len(world.has("b"))) == (1, 2), "both are full: by load"


def test_a_replica_whose_queue_moves_in_time_is_preferred() -> None:
    world = FakeFleet(2)
    world.connect("a", "b")
    world.replicas["a"].queue_changed(queue(3, seconds_per_request=1.0))
    world.replicas["b"].queue_changed(queue(3, seconds_per_request=0.1))
    for _ in range(2):
        world.start(deadline=2.0)
        world.replicas["b"].queue_changed(queue(3, seconds_per_request=0.1))
    assert (len(world.has("a")), len(world.has("b"))) == (0, 2)
    world.start()
    assert len(world.has("a")) == 1, "without a deadline both have room"


def test_a_queue_that_comes_with_a_step_is_the_one_before_it() -> None:
    world = FakeFleet(1)
    world.connect("a")
    replica = world.replicas["a"]
    world.start()
    (handle,) = replica.running
    admitted = scheduler_pb2.Admitted(handle=handle)
    full = scheduler_pb2.QueueState(num_waiting=4, max_num_waiting=4)
    deltas = SessionDeltas(replica, LIMITS)
    deltas.sent(handle, replica.running[handle])
    deltas.take(scheduler_pb2.StepDeltas(admitted=[admitted], queue=full))
    assert replica.queue_refusal(None) is None, "of the four that waited one was admitted"
    deltas.take(scheduler_pb2.StepDeltas(queue=full))
    assert replica.queue_refusal(None) is not None


def test_own_sequences_count_as_queued_until_they_are_admitted_or_end() -> None:
    world = FakeFleet(1)
    world.connect("a")
    replica = world.replicas["a"]
    replica.queue_changed(queue(2))
    mailboxes = [world.start(), world.start()]
    assert replica.queue_refusal(None) is not None
    first, second = replica.running
    replica.admitted(first, 0)
    assert replica.queue_refusal(None) is None
    mailboxes.append(world.start())
    assert replica.queue_refusal(None) is not None
    mailboxes[-1].close()
    assert replica.queue_refusal(None) is None
    replica.queue_changed(queue(4))
    replica.rejected(second, FULL)
    assert replica.queue_refusal(None) is None, "three of others, and none of its own"


def test_a_deadline_is_compared_with_the_time_in_the_queue() -> None:
    world = FakeFleet(1)
    world.connect("a")
    world.clock.advance(100.0)
    world.replicas["a"].queue_changed(queue(3, seconds_per_request=1.0))
    world.fleet.check_room(ANYONE, 103.5)
    with pytest.raises(ResourceExhausted) as refused:
        world.fleet.check_room(ANYONE, 102.5)
    assert refused.value.error_reason == "QUEUE_TOO_LONG"


def test_a_request_whose_deadline_passed_is_told_so_and_not_to_come_back() -> None:
    world = FakeFleet(1)
    world.connect("a")
    world.clock.advance(100.0)
    world.replicas["a"].queue_changed(queue(0, seconds_per_request=1.0))
    for caller in (ANYONE, Caller("t")):
        with pytest.raises(DeadlineExceeded) as refused:
            world.fleet.check_room(caller, 99.9)
        assert not refused.value.may_retry


def test_new_requests_are_refused_while_too_many_prompt_tokens_have_no_output() -> None:
    """The prompt tokens of a sequence count until its first output token, even while it waits."""
    world = FakeFleet(1, max_num_queued_tokens=9)
    ann = Caller("ann")
    first = world.start(prompt=[1] * 5)  # six tokens, and no replica yet
    for caller in (ANYONE, ann):
        world.fleet.check_room(caller, None)
    world.connect("a")
    world.start(prompt=[1] * 2, caller=ann)
    for caller in (ANYONE, ann):
        with pytest.raises(
            ResourceExhausted, match=r"without output have 9 prompt tokens; at 9 no"
        ) as refused:
            world.fleet.arriving(caller, None)
        assert refused.value.retry_after_seconds == 1.0
    running = next(one for one in world.has("a") if one.mailbox is first)
    running.output_token_ids.append(7)
    world.fleet.check_room(ANYONE, None)
    first.close()
    world.fleet.check_room(ann, None)
