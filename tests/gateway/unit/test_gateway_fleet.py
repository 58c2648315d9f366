"""Which replica a sequence goes to, and where it goes when that one is lost, stalls or refuses."""

import gc
import weakref

import pytest
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    StepwellError,
    Unavailable,
)
from services.common.finish_reason import FinishReason
from services.common.queue_state import QueueState
from services.gateway.adapters.scheduler_link import apply_deltas
from services.gateway.core.delivery import received
from services.gateway.core.delta import Delta, Finish
from services.gateway.core.inflight import MAX_LOSSES_COMPUTED, MAX_LOSSES_WAITED, Mailbox
from services.gateway.core.no_token import NAN_IN_LOGITS
from services.gateway.core.replica_description import ReplicaState
from services.gateway.core.tenant import ANYONE, Tenant
from tests.gateway.fake_fleet import (
    LIMITS,
    MIGRATE_AFTER_SECONDS,
    RESUBMIT_TIMEOUT_SECONDS,
    FakeFleet,
)

FULL = ResourceExhausted("full", reason="QUEUE_FULL", retry_after_seconds=0.5)
DRAINING = Unavailable("draining", retry_after_seconds=0.5)


async def only_delta(mailbox: Mailbox) -> Delta:
    """What came for the only sequence."""
    [(index, delta)] = await received(mailbox)
    assert index == 0
    return delta


async def error_of(mailbox: Mailbox) -> StepwellError:
    """The error that the only sequence ended with."""
    error = (await only_delta(mailbox)).error
    assert error is not None
    return error


# Choice.


def test_a_sequence_goes_to_the_replica_with_the_fewest_unfinished_ones() -> None:
    world = FakeFleet(3)
    world.connect("a", "b", "c")
    for _ in range(6):
        world.start()
    assert [len(world.has(name)) for name in "abc"] == [2, 2, 2]
    (first, _) = world.has("b")
    world.replicas["b"].finished(
        world.handle(world.replicas["b"], first), Finish(FinishReason.STOP)
    )
    world.start()
    assert [len(world.has(name)) for name in "abc"] == [2, 2, 2]


def test_answers_to_one_prompt_go_to_one_replica_where_they_share_its_blocks() -> None:
    world = FakeFleet(2)
    world.connect("a", "b")
    world.start(num_prompts=2, n=3)
    for name in "ab":
        prompts = {tuple(inflight.request.prompt_token_ids) for inflight in world.has(name)}
        assert (len(world.has(name)), len(prompts)) == (3, 1)


def test_replicas_that_cannot_run_steps_get_nothing() -> None:
    world = FakeFleet(2)
    world.connect("a", "b")
    world.replicas["a"].state_changed(ReplicaState(ready=False, reason="no worker"))
    world.start()
    world.start()
    assert (len(world.has("a")), len(world.has("b"))) == (0, 2)
    assert world.fleet.membership.not_ready() == {"a": "no worker"}
    assert world.fleet.membership.why_not_ready() == ""


# Waiting.


async def test_sequences_wait_in_order_of_arrival_for_a_replica() -> None:
    world = FakeFleet(1)
    mailboxes = [world.start() for _ in range(3)]
    assert world.fleet.num_waiting == 3
    assert world.fleet.membership.why_not_ready() == "no replica is ready: a (not connected yet)"
    world.clock.advance(RESUBMIT_TIMEOUT_SECONDS - 1)
    world.connect("a")
    assert world.fleet.num_waiting == 0
    sent = list(world.links["a"].added.values())
    assert sent == [mailbox.inflights[0] for mailbox in mailboxes]


async def test_a_wait_ends_after_the_resubmit_timeout() -> None:
    world = FakeFleet(1)
    mailbox = world.start()
    world.clock.advance(RESUBMIT_TIMEOUT_SECONDS)
    error = await error_of(mailbox)
    assert isinstance(error, Unavailable)
    assert error.error_reason == "NO_REPLICA_READY"
    assert world.fleet.num_waiting == 0


def test_a_sequence_that_is_aborted_while_it_waits_is_never_sent() -> None:
    world = FakeFleet(1)
    world.start().close()
    world.connect("a")
    assert (world.fleet.num_waiting, world.links["a"].added) == (0, {})


# Loss.


async def test_a_lost_sequence_goes_on_elsewhere_with_its_tokens() -> None:
    world = FakeFleet(2)
    world.connect("a")
    mailbox = world.start()
    (inflight,) = world.has("a")
    inflight.tokens([7, 8])
    world.connect("b")
    world.replicas["a"].closed("killed")
    assert world.has("b") == [inflight]
    assert inflight.output_token_ids == [7, 8]
    assert (await only_delta(mailbox)).token_ids == [7, 8], "each token is delivered once"


async def test_a_sequence_that_has_all_its_tokens_ends_with_the_replica() -> None:
    world = FakeFleet(1)
    world.connect("a")
    mailbox = world.start(max_tokens=2)
    (inflight,) = world.has("a")
    inflight.tokens([7, 8])
    world.replicas["a"].closed("killed")
    assert (await only_delta(mailbox)).finish == Finish(FinishReason.LENGTH)
    assert world.fleet.num_waiting == 0


@pytest.mark.parametrize(
    ("computing", "num_losses"), [(True, MAX_LOSSES_COMPUTED), (False, MAX_LOSSES_WAITED)]
)
async def test_a_sequence_under_which_replicas_die_again_and_again_is_given_up(
    computing: bool, num_losses: int
) -> None:
    world = FakeFleet(1)
    world.connect("a")
    mailbox = world.start()
    replica = world.replicas["a"]
    for number in range(num_losses + 1):
        (handle,) = replica.running
        if computing:
            replica.admitted(handle, 0)
        replica.closed("killed")
        assert world.fleet.num_waiting == (number < num_losses)
        world.connect("a")
    error = await error_of(mailbox)
    assert isinstance(error, Aborted)
    assert error.error_reason == "REPLICAS_LOST"


def test_a_token_between_losses_clears_a_sequence_of_suspicion() -> None:
    world = FakeFleet(1)
    world.connect("a")
    world.start(max_tokens=100)
    replica = world.replicas["a"]
    for _ in range(3 * MAX_LOSSES_COMPUTED):
        (handle,) = replica.running
        replica.admitted(handle, 0)
        replica.running[handle].tokens([7])
        replica.closed("killed")
        world.connect("a")
    assert len(world.has("a")) == 1


# Migration.


def test_sequences_leave_a_replica_that_cannot_run_steps_for_too_long() -> None:
    world = FakeFleet(2)
    world.connect("a")
    world.start()
    (inflight,) = world.has("a")
    (handle,) = world.replicas["a"].running
    world.connect("b")
    world.replicas["a"].state_changed(ReplicaState(ready=False, reason="no worker"))
    world.clock.advance(MIGRATE_AFTER_SECONDS / 2)
    assert world.has("a") == [inflight]
    world.clock.advance(MIGRATE_AFTER_SECONDS)
    assert (world.has("a"), world.has("b")) == ([], [inflight])
    assert world.links["a"].aborted == [handle]


def test_sequences_stay_while_no_other_replica_is_ready() -> None:
    world = FakeFleet(2)
    world.connect("a")
    world.start()
    world.replicas["a"].state_changed(ReplicaState(ready=False, reason="no worker"))
    world.clock.advance(10 * MIGRATE_AFTER_SECONDS)
    assert len(world.has("a")) == 1
    world.connect("b")
    assert (len(world.has("a")), len(world.has("b"))) == (0, 1)


def test_sequences_of_a_scheduler_that_drains_finish_there() -> None:
    world = FakeFleet(2)
    world.connect("a", "b")
    world.start(n=2)
    (name,) = (name for name in "ab" if world.has(name))
    world.replicas[name].state_changed(ReplicaState(ready=False, reason="stops", draining=True))
    world.clock.advance(10 * MIGRATE_AFTER_SECONDS)
    assert len(world.has(name)) == 2


# Rejection.


def reject(world: FakeFleet, error: StepwellError) -> str:
    """The only sequence is refused where it is; returns the replica's name."""
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
    await only_delta(mailbox)  # it was admitted
    assert world.fleet.num_waiting == 0, "its time began with the loss"


async def test_what_is_wrong_with_a_request_is_wrong_everywhere() -> None:
    world = FakeFleet(2)
    world.connect("a", "b")
    mailbox = world.start()
    wrong = InvalidArgument("wrong")
    reject(world, wrong)
    assert await error_of(mailbox) is wrong
    assert not world.has("a")
    assert not world.has("b")


# Queues.


def queue(num_waiting: int, seconds_per_request: float = 0.0) -> QueueState:
    return QueueState(num_waiting, 4, 0.0, seconds_per_request)


def test_there_is_room_while_one_replica_takes_requests() -> None:
    world = FakeFleet(2)
    world.connect("a", "b")
    world.fleet.check_room(ANYONE, None)
    world.replicas["a"].queue_changed(queue(4))
    world.fleet.check_room(ANYONE, None)
    world.replicas["b"].queue_changed(queue(4))
    with pytest.raises(ResourceExhausted, match="4 requests wait already"):
        world.fleet.check_room(ANYONE, None)
    world.replicas["b"].closed("killed")
    with pytest.raises(ResourceExhausted):
        world.fleet.check_room(ANYONE, None)
    world.replicas["a"].closed("killed")
    world.fleet.check_room(ANYONE, None)  # requests wait for a replica


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
    apply_deltas(scheduler_pb2.StepDeltas(admitted=[admitted], queue=full), replica)
    assert replica.queue_refusal(None) is None, "of the four that waited one was admitted"
    apply_deltas(scheduler_pb2.StepDeltas(queue=full), replica)
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
    for tenant in (ANYONE, Tenant("t")):
        with pytest.raises(DeadlineExceeded) as refused:
            world.fleet.check_room(tenant, 99.9)
        assert not refused.value.may_retry


# One model.


def test_replicas_with_another_model_get_nothing() -> None:
    world = FakeFleet(2)
    world.connect("a")
    world.connect("b", fingerprint=b"g")
    assert world.fleet.membership.num_ready == 1
    assert "fingerprint" in world.fleet.membership.not_ready()["b"]
    world.replicas["a"].closed("killed")
    assert world.fleet.membership.num_ready == 0, "it does not take over at once"
    world.clock.advance(RESUBMIT_TIMEOUT_SECONDS)
    assert world.fleet.membership.num_ready == 1
    assert world.replicas["b"].is_ready


async def test_a_sequence_that_has_begun_does_not_go_on_under_another_model() -> None:
    world = FakeFleet(1)
    world.connect("a")
    begun, fresh = world.start(), world.start()
    begun.inflights[0].tokens([7])
    world.replicas["a"].closed("replaced")
    world.connect("a", fingerprint=b"g")
    assert (await error_of(begun)).error_reason == "MODEL_REPLACED"
    assert world.has("a") == fresh.inflights


def test_limits_are_the_tightest_and_stay_known_while_no_replica_is_ready() -> None:
    world = FakeFleet(2)
    with pytest.raises(Unavailable):
        world.fleet.limits()
    world.connect("a")
    world.connect("b", limits=type(LIMITS)(80, 95, 320, (0,), True, 4))
    limits = world.fleet.limits()
    assert (limits.max_model_len, limits.max_request_tokens) == (80, 90)
    assert not limits.priority_scheduling
    for name in "ab":
        world.replicas[name].closed("killed")
    assert world.fleet.limits().max_model_len == 80


# Ends.


async def test_nan_is_the_requests_fault_where_it_bans_every_token() -> None:
    world = FakeFleet(1)
    world.connect("a")
    mailbox = world.start()
    (inflight,) = world.has("a")
    (handle,) = world.replicas["a"].running
    error = Aborted("NaN", reason=NAN_IN_LOGITS)
    world.replicas["a"].finished(handle, error)
    assert await error_of(mailbox) is error, "it bans none"
    assert inflight not in world.has("a")


async def test_giving_up_ends_what_runs_and_what_waits() -> None:
    world = FakeFleet(1)
    world.connect("a")
    running = world.start()
    (handle,) = world.replicas["a"].running
    world.replicas["a"].state_changed(ReplicaState(ready=False, reason="stops", draining=True))
    waiting = world.start()
    error = Unavailable("shutting down")
    world.fleet.give_up(error)
    assert [await error_of(running), await error_of(waiting)] == [error, error]
    assert world.links["a"].aborted == [handle]
