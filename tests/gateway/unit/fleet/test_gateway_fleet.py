"""The fleet chooses replicas for sequences, and others if these are lost, stall or refuse."""

from dataclasses import replace

import pytest

from services.common.errors import Aborted, Unavailable
from services.common.request.finish import Finish, FinishReason
from services.gateway.core.fleet.admission import Admission
from services.gateway.core.fleet.replica_description import ReplicaState
from services.gateway.core.request.inflight import (
    MAX_LOSSES_COMPUTED,
    MAX_LOSSES_WAITED,
    Inflight,
)
from services.gateway.core.request.no_token import NAN_IN_LOGITS
from services.gateway.core.routing_decision import RoutingDecision
from tests.gateway.fake_fleet import (
    LIMITS,
    MIGRATE_AFTER_SECONDS,
    RESUBMIT_TIMEOUT_SECONDS,
    FakeFleet,
    error_of,
    only_delta,
)

# The choice of a replica.


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


def test_each_answer_that_is_sent_is_counted_by_the_admission() -> None:
    sent: list[Inflight] = []

    class Counting(Admission):
        def sent(self, inflight: Inflight, _route: RoutingDecision) -> None:
            sent.append(inflight)

    world = FakeFleet(2)
    world.fleet.admission = Counting()
    world.connect("a", "b")
    mailbox = world.start(num_prompts=2, n=3)
    assert sent == mailbox.inflights


def test_replicas_that_cannot_run_steps_get_nothing() -> None:
    world = FakeFleet(2)
    world.connect("a", "b")
    world.replicas["a"].state_changed(ReplicaState(ready=False, reason="no worker"))
    world.start()
    world.start()
    assert (len(world.has("a")), len(world.has("b"))) == (0, 2)
    assert world.fleet.membership.not_ready() == {"a": "no worker"}
    assert world.fleet.membership.why_not_ready() == ""


# Sequences that wait for a replica.


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


# The loss of a replica.


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


# Sequences that move to another replica.


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


def test_sequences_of_a_scheduler_that_drains_finish_there_while_it_can_run_steps() -> None:
    world = FakeFleet(2)
    world.connect("a", "b")
    world.start(n=2)
    (name,) = (name for name in "ab" if world.has(name))
    draining = ReplicaState(ready=False, reason="stops", draining=True)
    world.replicas[name].state_changed(draining)
    world.clock.advance(10 * MIGRATE_AFTER_SECONDS)
    assert len(world.has(name)) == 2
    world.replicas[name].state_changed(replace(draining, reason="no worker", stalled=True))
    world.clock.advance(MIGRATE_AFTER_SECONDS / 2)
    assert len(world.has(name)) == 2
    world.clock.advance(MIGRATE_AFTER_SECONDS)
    assert len(world.has(name)) == 0


# All replicas serve one model.


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


# The end of sequences.


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
