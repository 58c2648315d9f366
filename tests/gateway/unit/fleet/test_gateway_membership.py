"""Replicas that join and leave while requests run."""

from threading import Event, Thread, current_thread, main_thread

from services.gateway.adapters.telemetry.fleet_metrics import FleetCollector
from services.gateway.core.fleet.membership import LEAVE_AFTER_SECONDS
from services.gateway.core.fleet.replica import Replica
from services.gateway.core.fleet.replica_description import ReplicaDescription, ReplicaState
from services.gateway.core.fleet.routing.cache_aware import SPREAD_MIN_SHARING
from services.gateway.core.request.inflight import Mailbox
from services.gateway.core.routing_decision import RoutingReason
from tests.gateway.fake_fleet import (
    BLOCK_SIZE,
    LIMITS,
    MAX_LOAD_DELTA,
    RESUBMIT_TIMEOUT_SECONDS,
    FakeFleet,
)

DRAINING = ReplicaState(ready=False, reason="the scheduler is draining", draining=True)


def names(world: FakeFleet) -> list[str]:
    return [replica.address for replica in world.fleet.membership.replicas]


def route_of(mailbox: Mailbox) -> tuple[str, RoutingReason]:
    return mailbox.routes[-1].address, mailbox.routes[-1].reason


# Replicas that join.


def test_a_fleet_may_begin_without_a_replica_and_sends_what_waits_to_the_first_one() -> None:
    world = FakeFleet(0)
    world.start()
    assert world.fleet.membership.why_not_ready() == "no replica is ready: none is known"
    world.fleet.set_addresses("redis", ["a"])
    assert (names(world), world.opened) == (["a"], ["a"])
    world.connect("a")
    assert (len(world.has("a")), world.fleet.num_waiting) == (1, 0)


def test_a_replica_joins_once_however_many_sources_name_it() -> None:
    world = FakeFleet(1)
    for _ in range(2):
        world.fleet.set_addresses("redis", ["b", "a", "b"])
    assert (names(world), world.opened) == (["a", "b"], ["a", "b"])
    world.fleet.set_addresses("redis", [])
    world.clock.advance(LEAVE_AFTER_SECONDS)
    world.fleet.set_addresses("redis", [])
    assert (names(world), world.opened) == (["a"], ["a"]), "the settings still name it"


def test_a_replica_that_joins_gets_requests_at_once() -> None:
    world = FakeFleet(1)
    world.connect("a")
    world.start()
    world.fleet.set_addresses("redis", ["b"])
    world.connect("b")
    world.start()
    assert (len(world.has("a")), len(world.has("b"))) == (1, 1)


def test_the_same_scheduler_under_two_addresses_gets_requests_by_one() -> None:
    world = FakeFleet(2)
    for name in "ab":
        replica = world.replicas[name]
        replica.opened(ReplicaDescription("tiny", LIMITS, b"f", b"", BLOCK_SIZE, "node"))
        replica.state_changed(ReplicaState(ready=True))
    assert world.fleet.membership.not_ready() == {"b": "the replica is already connected as a"}
    world.replicas["a"].closed("unplugged")
    assert world.fleet.membership.num_ready == 1
    world.start()
    assert len(world.has("b")) == 1


# Replicas that leave.


def test_a_replica_that_is_named_no_more_stays_as_long_as_it_has_a_session() -> None:
    world = FakeFleet(0)
    world.fleet.set_addresses("redis", ["a", "b"])
    world.connect("a", "b")
    world.fleet.set_addresses("redis", [])
    world.clock.advance(1000)
    world.fleet.set_addresses("redis", [])
    assert names(world) == ["a", "b"]
    for _ in range(2):
        world.start()
    assert (len(world.has("a")), len(world.has("b"))) == (1, 1)


def test_it_leaves_when_it_has_had_no_session_for_some_seconds() -> None:
    world = FakeFleet(1)
    world.fleet.set_addresses("redis", ["b"])
    world.connect("a", "b")
    for _ in range(2):
        world.start()
    assert (len(world.has("a")), len(world.has("b"))) == (1, 1)
    world.replicas["b"].closed("killed")
    assert len(world.has("a")) == 2, "its sequences go elsewhere at once"
    world.fleet.set_addresses("redis", [])
    world.clock.advance(LEAVE_AFTER_SECONDS - 0.1)
    world.fleet.set_addresses("redis", [])
    assert names(world) == ["a", "b"]
    world.clock.advance(0.1)
    world.fleet.set_addresses("redis", [])
    assert (names(world), world.opened) == (["a"], ["a"])


def test_a_session_that_is_back_in_time_keeps_it() -> None:
    world = FakeFleet(0)
    world.fleet.set_addresses("redis", ["a"])
    world.connect("a")
    world.fleet.set_addresses("redis", [])
    world.replicas["a"].closed("a blip")
    world.clock.advance(LEAVE_AFTER_SECONDS - 0.1)
    world.connect("a")
    world.clock.advance(LEAVE_AFTER_SECONDS)
    world.fleet.set_addresses("redis", [])
    assert names(world) == ["a"]


def test_a_replica_that_drains_ends_what_it_has_and_leaves_with_its_session() -> None:
    world = FakeFleet(1)
    world.fleet.set_addresses("redis", ["b"])
    world.connect("a", "b")
    for _ in range(4):
        world.start()
    assert len(world.has("b")) == 2
    world.fleet.set_addresses("redis", [])
    world.replicas["b"].state_changed(DRAINING)
    world.start()
    assert (len(world.has("a")), len(world.has("b"))) == (3, 2)
    world.fleet.set_addresses("redis", [])
    assert names(world) == ["a", "b"], "two sequences run there"
    world.replicas["b"].closed("the scheduler ended the session")
    assert len(world.has("a")) == 5
    world.fleet.set_addresses("redis", [])
    assert (names(world), world.opened) == (["a"], ["a"])


def test_a_replica_may_come_back_under_its_address() -> None:
    world = FakeFleet(0)
    for _ in range(3):
        world.fleet.set_addresses("redis", ["a"])
        world.connect("a")
        world.replicas["a"].state_changed(DRAINING)
        world.replicas["a"].closed("ended")
        world.fleet.set_addresses("redis", [])
        assert (names(world), world.opened) == ([], [])


# Replicas with other models.


def test_a_model_is_replaced_when_the_last_replica_of_the_old_one_has_drained() -> None:
    world = FakeFleet(0)
    world.fleet.set_addresses("redis", ["old", "new"])
    world.connect("old", fingerprint=b"f")
    world.connect("new", fingerprint=b"g")
    assert world.fleet.membership.not_ready().keys() == {"new"}
    world.replicas["old"].state_changed(DRAINING)
    world.replicas["old"].closed("ended")
    world.start()
    assert world.fleet.num_waiting == 1
    world.fleet.set_addresses("redis", ["new"])
    assert len(world.has("new")) == 1


def test_a_crash_of_the_last_replica_of_a_model_hands_it_to_no_other_one_at_once() -> None:
    world = FakeFleet(0)
    world.fleet.set_addresses("redis", ["good", "wrong"])
    world.connect("good", fingerprint=b"f")
    world.connect("wrong", fingerprint=b"g")
    world.replicas["good"].closed("killed")
    world.clock.advance(LEAVE_AFTER_SECONDS)
    world.fleet.set_addresses("redis", ["wrong"])
    assert names(world) == ["wrong"]
    world.start()
    assert world.has("wrong") == []
    world.fleet.set_addresses("redis", ["wrong", "good again"])
    world.connect("good again", fingerprint=b"f")
    assert len(world.has("good again")) == 1


def test_after_the_usual_time_another_model_is_taken() -> None:
    world = FakeFleet(0)
    world.fleet.set_addresses("redis", ["good", "other"])
    world.connect("good", fingerprint=b"f")
    world.connect("other", fingerprint=b"g")
    world.replicas["good"].closed("killed")
    world.clock.advance(LEAVE_AFTER_SECONDS)
    world.fleet.set_addresses("redis", ["other"])
    world.clock.advance(RESUBMIT_TIMEOUT_SECONDS)
    assert world.fleet.membership.num_ready == 1


# Routing to replicas that join.


def test_a_cold_replica_gets_its_share_of_a_hot_prefix_and_no_more_at_once() -> None:
    world = FakeFleet(1, policy="cache-aware", max_load_delta=100)
    prompt = list(range(1, 101))
    world.connect("a")
    world.directory = {"a": 25}
    for _ in range(SPREAD_MIN_SHARING):
        world.start(prompt=prompt)
    for handle in world.replicas["a"].running:
        world.replicas["a"].admitted(handle, 100)
    world.fleet.set_addresses("redis", ["b"])
    world.connect("b")
    # Sequences sent while there was only one replica do not count as sharing the prefix.
    routes = [route_of(world.start(prompt=prompt)) for _ in range(SPREAD_MIN_SHARING + 1)]
    assert routes[:-1] == [("a", RoutingReason.CACHED)] * SPREAD_MIN_SHARING
    assert routes[-1] == ("b", RoutingReason.SPREAD)
    # The prompt now counts as cached at replica "b", too. So further sequences are routed by cost.
    for _ in range(40):
        world.start(prompt=prompt)
    loads = [len(world.has(name)) for name in "ab"]
    assert sum(loads) == 2 * SPREAD_MIN_SHARING + 41
    assert max(loads) < 2 * min(loads)


def test_the_load_cap_ramps_a_cold_replica_where_nothing_else_would() -> None:
    world = FakeFleet(1, policy="cache-aware")
    world.connect("a")
    for number in range(3 * MAX_LOAD_DELTA):
        world.start(prompt=[number] * 40)
    world.fleet.set_addresses("redis", ["b"])
    world.connect("b")
    taken = [route_of(world.start(prompt=[number] * 40))[0] for number in range(8)]
    assert taken == ["b"] * 8, "the other one has too many more, whatever it has cached"


def test_of_the_sessions_on_a_ring_only_a_newcomers_share_moves() -> None:
    world = FakeFleet(3, policy="consistent-hash")
    world.connect("a", "b", "c")

    def places() -> dict[str, str]:
        found = {}
        for number in range(60):
            mailbox = world.start(session_id=f"s{number}")
            found[f"s{number}"] = route_of(mailbox)[0]
            mailbox.close()
        return found

    before = places()
    world.fleet.set_addresses("redis", ["d"])
    world.connect("d")
    after = places()
    moved = {session for session in before if before[session] != after[session]}
    assert {after[session] for session in moved} == {"d"}
    assert 3 <= len(moved) <= 30
    world.fleet.set_addresses("redis", [])
    world.replicas["d"].state_changed(DRAINING)
    world.replicas["d"].closed("ended")
    world.fleet.set_addresses("redis", [])
    assert places() == before


class SlowReplica(Replica):
    """A replica whose state another thread reads slowly."""

    reached, goes_on = Event(), Event()

    @property
    def is_ready(self) -> bool:
        is_ready = super().is_ready
        if current_thread() is not main_thread():
            self.reached.set()
            assert self.goes_on.wait(60)
        return is_ready


def test_a_replica_that_is_lost_during_a_scrape_is_not_ready_after_it() -> None:
    world = FakeFleet(2)
    world.connect("a", "b")
    world.replicas["b"].__class__ = SlowReplica
    collector = FleetCollector(world.fleet, "tiny", None)
    world.fleet.membership.readiness_changed()
    scrape = Thread(target=lambda: list(collector.collect()))
    scrape.start()
    assert SlowReplica.reached.wait(60)
    world.replicas["a"].closed("killed")
    SlowReplica.goes_on.set()
    scrape.join()
    assert [replica.address for replica in world.fleet.membership.ready()] == ["b"]
