"""A routing policy examines only a few replicas, but chooses the same one as if it examined all."""

import random

from hypothesis import given
from hypothesis import strategies as st

from services.common.replica.load import ReplicaLoad
from services.common.request.finish import Finish, FinishReason
from services.gateway.core.fleet.load_tracker import RECENT_SECONDS, era_of
from services.gateway.core.fleet.recent_prefixes import RecentPrefixes, RecentReplicas
from services.gateway.core.fleet.routing.load_order import LoadOrder
from services.gateway.core.fleet.routing.offers import Offers
from tests.gateway.fake_fleet import FakeFleet

NUM_REPLICAS = 8
KEYS = (1, 2, 3)
ALL = 1 << 30


def a_while(world: FakeFleet, rng: random.Random, num_events: int) -> None:
    """Makes random events happen: requests arrive, are admitted, get tokens and end, replicas
    report their loads, and time passes.
    """
    for _ in range(num_events):
        replica = rng.choice(list(world.replicas.values()))
        handles = list(replica.running)
        match rng.choice(("start", "start", "admit", "token", "end", "report", "pass")):
            case "start":
                world.start(prompt=range(rng.choice((1, 5, 20, 80))))
            case "admit" if handles:
                replica.admitted(rng.choice(handles), rng.choice((0, 1)))
            case "token" if handles:
                replica.running[rng.choice(handles)].tokens([1] * rng.choice((1, 5)))
            case "end" if handles:
                replica.finished(rng.choice(handles), Finish(FinishReason.STOP))
            case "report":
                times = rng.choice((1e-4, 2e-4)), rng.choice((1e-4, 5e-4))
                replica.load_changed(ReplicaLoad(0, rng.choice((0, 50)), *times, rng.randrange(2)))
            case _:
                world.clock.advance(rng.choice((0.1, 5.0, 300 * RECENT_SECONDS)))


@given(st.randoms(use_true_random=False), st.integers(0, 60), st.sampled_from([0, 1, 2, ALL]))
def test_few_replicas_are_examined_and_the_cheapest_are_among_them(
    rng: random.Random, num_events: int, delta: int
) -> None:
    world = FakeFleet(NUM_REPLICAS, policy=rng.choice(("least-loaded", "power-of-two")))
    world.connect(*world.replicas)
    a_while(world, rng, num_events)
    if rng.random() < 0.5:
        for replica in world.replicas.values():
            replica.load_changed(ReplicaLoad(0, 0, 1e-4, 3e-4))
    now = world.clock.time()
    (inflight,) = world.start(prompt=range(rng.choice((3, 12, 60)))).inflights
    order = LoadOrder(world.fleet.membership.ready(), era_of(now).number)
    few, every = (Offers(order, inflight, KEYS, now) for _ in range(2))
    nodes = {name: rng.randint(1, 3) for name in rng.sample("abcdefgh", rng.randint(0, 2))}
    few.examine(nodes, rng.sample("abcdefgh", rng.randint(0, 1)))
    every.examine(nodes, world.replicas)
    for factor in (1.0, 1.05, 1.5):
        expected = every.near(order.least + delta, factor)
        costs = {order.index_of[one.replica.address]: one.cost_seconds for one in expected.examined}
        assert expected.best.cost_seconds == min(costs.values())
        most = factor * expected.best.cost_seconds
        assert expected.indexes == sorted(index for index, cost in costs.items() if cost <= most)
        near = few.near(order.least + delta, factor)
        assert (near.best, near.indexes) == (expected.best, expected.indexes)
        assert [few.at(index).cost_seconds for index in costs] == list(costs.values())


@given(st.randoms(use_true_random=False))
def test_an_order_that_follows_changes_equals_a_new_one(rng: random.Random) -> None:
    world = FakeFleet(NUM_REPLICAS, policy="power-of-two")
    world.connect(*world.replicas)
    replicas = world.fleet.membership.ready()
    kept = LoadOrder(replicas, 0)
    kept.follow()
    for _ in range(4):
        a_while(world, rng, 10)
        if (number := era_of(world.clock.time()).number) != kept.era_number:
            kept = LoadOrder(replicas, number)
            kept.follow()
        kept.update()
        new = LoadOrder(replicas, number)
        assert list(kept.levels(ALL)) == list(new.levels(ALL))
        assert kept.mean_weight == new.mean_weight
        assert kept.fleet_speeds == new.fleet_speeds
        assert kept.idle_speeds == new.idle_speeds
        assert kept.least_output_tokens <= new.least_output_tokens


def test_a_replica_that_certainly_costs_more_is_not_examined() -> None:
    world = FakeFleet(NUM_REPLICAS, policy="round-robin")
    world.connect(*world.replicas)
    for _ in world.replicas:
        world.start()
    (inflight,) = world.start().inflights  # the second sequence at replica "a"
    order = LoadOrder(world.fleet.membership.ready(), 0)
    near = Offers(order, inflight, KEYS, 0.0).near(ALL, 1.05)
    assert [order.replicas[index].address for index in near.indexes] == list("bcdefgh")


@given(
    st.lists(st.tuples(st.floats(0, 3), st.sampled_from("abc"), st.integers(0, 2))),
    st.integers(0, 2),
)
def test_a_replica_that_expects_a_prefix_is_found_by_its_first_key(
    sent: list[tuple[float, str, int]], asked: int
) -> None:
    prefixes, found, now = {name: RecentPrefixes() for name in "abc"}, RecentReplicas(), 0.0
    for seconds, name, key in sent:
        now += seconds
        expecting = {name for name in "abc" if prefixes[name].depth([asked], now)}
        assert expecting == set(found.addresses(asked, now))
        prefixes[name].add([key], now)
        found.add(key, name, now)
