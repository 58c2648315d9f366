"""Sequences of tenants occupy slots of the replicas."""

import time

from services.common.replica.load import ReplicaLoad
from services.common.replica.queue_state import QueueState
from services.gateway.core.caller import ANYONE
from services.gateway.core.request.inflight import Mailbox
from services.gateway.options.tenants.core.queues.waiter import WaitReason
from services.gateway.options.tenants.core.tenant import Tenant
from tests.gateway.fake_fleet import FakeFleet, error_of
from tests.gateway.options.tenants.tenant_fleet import (
    BOUNDS,
    A,
    B,
    connected,
    finish,
    finish_first,
    queues_of,
    schedule_all,
    tenants_at,
    with_queues,
)

# The number of slots.


def test_a_tenant_alone_has_all_slots_and_one_sequence_ahead() -> None:
    world = connected(num_slots=2)
    mailboxes = [world.start(caller=A) for _ in range(5)]
    assert (tenants_at(world), world.fleet.num_waiting) == ("aaa", 2)
    assert [len(mailbox.routes) for mailbox in mailboxes] == [1, 1, 1, 0, 0]
    finish_first(world)
    assert (tenants_at(world), world.fleet.num_waiting) == ("aaa", 1)


def test_the_next_slot_is_for_the_tenant_that_was_served_less() -> None:
    """The slots are occupied by requests of another gateway, which end one after another."""
    world = connected(num_slots=6)
    for num_others, expected in ((7, ""), (5, "a"), (4, "ab"), (3, "aba"), (2, "abab")):
        world.replicas["a"].load_changed(ReplicaLoad(7, 0, num_other_requests=num_others))
        for tenant in (A, A, A, B, B) if num_others == 7 else ():
            world.start(caller=tenant)
        assert tenants_at(world) == expected


def test_reports_of_full_replicas_take_no_time_however_many_tenants_wait() -> None:
    world = connected(num_slots=4)
    for number in range(1000):
        world.start(caller=Tenant(f"{number}"))
    began = time.process_time()
    world.start(caller=A)
    middle = time.process_time()
    for _ in range(200):
        world.replicas["a"].load_changed(ReplicaLoad(4, 0))
    assert time.process_time() - middle < 50 * (middle - began)
    finish_first(world)
    assert len(world.has("a")) == 4
    world.replicas["a"].load_changed(ReplicaLoad(9, 0, num_other_requests=5))
    finish_first(world)
    assert len(world.has("a")) == 3
    world.replicas["a"].load_changed(ReplicaLoad(3, 0))
    assert len(world.has("a")) == 4


def test_requests_without_a_tenant_never_wait_here() -> None:
    world = connected(num_slots=2)
    for _ in range(10):
        world.start(caller=ANYONE)
    assert (len(world.has("a")), world.fleet.num_waiting) == (10, 0)


def test_nothing_waits_where_a_replica_does_not_say_how_many_it_runs() -> None:
    world = with_queues(FakeFleet(1))
    world.connect("a")
    for _ in range(6):
        world.start(caller=A)
    assert tenants_at(world) == "aaaaaa"


def test_requests_of_other_gateways_take_slots() -> None:
    world = connected(num_slots=4)
    world.replicas["a"].load_changed(ReplicaLoad(3, 0, num_other_requests=3))
    world.start(caller=B).close()
    world.start(caller=A)
    world.start(caller=A)
    assert (tenants_at(world), world.fleet.num_waiting) == ("a", 1)
    world.replicas["a"].load_changed(ReplicaLoad(2, 0, num_other_requests=1))
    assert (tenants_at(world), world.fleet.num_waiting) == ("aa", 0)


def test_where_blocks_are_missing_few_wait_at_the_replica() -> None:
    """A replica gets fewer slots after it has reported twice in a row that blocks are missing."""
    world = connected(num_slots=8)
    blocked = QueueState(4, 1024, 60.0, num_running=3, is_blocked=True)
    world.replicas["a"].queue_changed(blocked)
    assert world.replicas["a"].num_slots == 8, "it may have been a burst of prompts"
    world.replicas["a"].queue_changed(blocked)
    assert world.replicas["a"].num_slots == 5
    world.replicas["a"].queue_changed(QueueState(0, 1024, 60.0, num_running=3))
    assert world.replicas["a"].num_slots == 8


def test_requests_that_wait_at_a_replica_for_its_next_step_take_no_slots_away() -> None:
    """During a long step the replica reports the same waiting requests several times."""
    world = connected(num_slots=8)
    for _ in range(3):
        world.replicas["a"].queue_changed(QueueState(4, 1024, 60.0, num_running=3))
    assert world.replicas["a"].num_slots == 8


def test_of_several_replicas_one_with_a_free_slot_is_chosen() -> None:
    world = connected(num_slots=2, num_replicas=2)
    world.replicas["a"].load_changed(ReplicaLoad(2, 0, num_other_requests=2))
    world.replicas["b"].load_changed(ReplicaLoad(1, 0, num_other_requests=1))
    world.start(caller=A)
    assert (tenants_at(world, "a"), tenants_at(world, "b")) == ("", "a")


def test_answers_to_one_prompt_follow_each_other_to_one_replica() -> None:
    world = connected(num_slots=4, num_replicas=2)
    world.start(caller=A, num_prompts=2, n=3)
    for name in "ab":
        prompts = {tuple(inflight.request.prompt_token_ids) for inflight in world.has(name)}
        assert (len(world.has(name)), len(prompts)) == (3, 1)


# Slots that tenants must release.


def flooded(num_running: int = 4) -> tuple[FakeFleet, list[Mailbox]]:
    """Tenant A occupies all slots of a replica. One more of its sequences waits at the replica, and
    two wait at the gateway.
    """
    world = connected(num_slots=num_running)
    mailboxes = [world.start(caller=A) for _ in range(num_running + 3)]
    assert (tenants_at(world), world.fleet.num_waiting) == ("a" * (num_running + 1), 2)
    schedule_all(world)
    return world, mailboxes


def test_a_tenant_below_its_share_has_a_slot_at_once() -> None:
    world, mailboxes = flooded(num_running=4)
    quiet = [world.start(caller=B) for _ in range(3)]
    assert tenants_at(world) == "aabb", "each has two of the four"
    assert [len(mailbox.waits) for mailbox in quiet] == [0, 0, 0]
    assert world.links["a"].aborted == [5, 4, 3], "those that came last, and no more than needed"
    assert queues_of(world.fleet).slots.num_waiting(A) == 5
    assert [one.mailbox for one in world.has("a")[:2]] == mailboxes[:2]


def test_a_sequence_that_was_taken_back_goes_on_before_those_that_came_later() -> None:
    world, mailboxes = flooded(num_running=2)
    for number, inflight in enumerate(world.has("a")):
        inflight.tokens([7, number])
    world.start(caller=B)
    assert tenants_at(world) == "ab"
    world.clock.advance(BOUNDS.max_queue_seconds - 1.0)
    finish_first(world)
    [again] = [one for one in world.has("a") if one.request.caller is A]
    assert (again.mailbox, again.output_token_ids) == (mailboxes[1], [7, 1])
    [wait] = again.mailbox.waits
    assert (wait.reason, wait.seconds) == (WaitReason.PREEMPTED, BOUNDS.max_queue_seconds - 1.0)
    assert len(again.mailbox.routes) == 2


async def test_a_sequence_that_was_taken_back_may_wait_for_any_time() -> None:
    world, mailboxes = flooded(num_running=2)
    world.start(caller=B)
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
        world.start(caller=B).close()
    taken = [mailbox.inflights[0].num_times_taken_back for mailbox in mailboxes[:4]]
    assert taken == [0, 0, 1, 1], "the last one, and then the one before it"


def test_of_a_tenants_sequences_those_that_may_run_latest_are_taken_back() -> None:
    world = connected(num_slots=4)
    for priority in (0, 5, 5, 0):
        world.start(caller=A, priority=priority)
    world.start(caller=B)
    world.start(caller=B)
    assert world.links["a"].aborted == [3, 2]


def test_what_a_sequence_cost_until_it_was_taken_back_is_charged() -> None:
    """The sequence got 3 of 50 tokens, which are charged. The rest is charged when it continues."""
    world = connected(num_slots=2)
    for _ in range(2):
        world.start(caller=A, max_tokens=50)
    for inflight in world.has("a"):
        inflight.tokens([1, 2, 3])
    queue = queues_of(world.fleet)
    use = queue.slots.usage(A)
    assert (use.num_running, use.num_waiting) == (2, 0)
    world.start(caller=B)
    assert (use.num_running, use.num_waiting) == (1, 1)
    assert use.mean_output_tokens == 128.0, "no answer has ended"
    finish_first(world)
    assert (use.num_running, use.num_waiting) == (1, 0)


def test_a_tenant_with_its_share_waits_for_one_of_its_own_to_end() -> None:
    world, _ = flooded(num_running=4)
    own = [world.start(caller=B) for _ in range(3)]
    assert [len(mailbox.routes) for mailbox in own] == [1, 1, 0]
    finish(world, own[0].inflights[0])
    assert [len(mailbox.routes) for mailbox in own] == [1, 1, 1]


# How many sequences start at once.


def test_of_a_flood_few_prompts_are_computed_at_once() -> None:
    """The fair share of each tenant is 4 of 8 slots. A tenant may start two sequences at once."""
    world = connected(num_slots=8)
    world.start(caller=B).close()
    mailboxes = [world.start(caller=A) for _ in range(6)]
    replica = world.replicas["a"]
    assert [len(mailbox.routes) for mailbox in mailboxes] == [1, 1, 0, 0, 0, 0]
    world.start(caller=B)
    assert tenants_at(world) == "aab", "another one does not wait for them"
    replica.admitted(world.handle(replica, mailboxes[0].inflights[0]), 0)
    assert tenants_at(world) == "aaba"
    finish(world, mailboxes[1].inflights[0])
    mailboxes[2].close()
    assert [len(mailbox.routes) for mailbox in mailboxes] == [1, 1, 1, 1, 1, 0]
    assert queues_of(world.fleet).slots.usage(A).num_starting == 2


# The order of sequences.


def test_sequences_of_a_tenant_go_by_priority_and_then_in_order_of_arrival() -> None:
    world = connected(num_slots=1)
    world.start(caller=A)
    world.start(caller=A)
    later = [world.start(caller=A, priority=priority) for priority in (0, 5, -5, 0)]
    order = []
    for _ in range(4):
        finish_first(world)
        order.append(
            next(i for i, mailbox in enumerate(later) if mailbox.inflights[0] is world.has("a")[-1])
        )
    assert order == [2, 0, 3, 1]


def test_what_answers_became_shorter_than_expected_is_given_back() -> None:
    """Each request of either tenant asks for 50 tokens. The answers to tenant B have only one
    token, so tenant B is next again and again.
    """
    world = connected(num_slots=2)
    for tenant in (A, B) * 4:
        world.start(caller=tenant, max_tokens=50)
    for _ in range(3):
        assert sorted(tenants_at(world)) == ["a", "b"]
        (short,) = [one for one in world.has("a") if one.request.caller is B]
        short.tokens([1])
        finish(world, short)
    assert tenants_at(world) == "ab"


def test_what_waits_goes_to_a_replica_that_joins() -> None:
    world = connected(num_slots=2)
    for _ in range(4):
        world.start(caller=A)
    num_waiting = world.fleet.num_waiting
    assert num_waiting > 0
    world.fleet.set_addresses("redis", ["b"])
    world.connect("b", max_num_seqs=2)
    assert (len(world.has("b")), world.fleet.num_waiting) == (num_waiting, 0)
