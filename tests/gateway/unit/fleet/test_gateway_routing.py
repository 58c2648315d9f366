"""To which replica a routing policy sends a sequence, and the reason that it reports."""

import random
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidArgument
from services.common.pool.block_hash import hash_full_blocks
from services.common.pool.kv_directory import block_keys
from services.common.replica.load import ReplicaLoad
from services.common.request.finish import Finish, FinishReason
from services.gateway.core.fleet.load_tracker import EVICTED_TOKENS_COUNT, OWN_TOKENS_COUNT
from services.gateway.core.fleet.recent_prefixes import MIN_SECONDS, RecentPrefixes
from services.gateway.core.fleet.routing import POLICIES, make_policy
from services.gateway.core.fleet.routing.cache_aware import SPREAD_MIN_SHARING
from services.gateway.core.fleet.routing.chain_keys import ChainKeys
from services.gateway.core.fleet.routing.offers import FEW_TOKENS
from services.gateway.core.fleet.routing.policy import RoutingParts
from services.gateway.core.request.inflight import Mailbox
from services.gateway.core.routing_decision import RoutingDecision, RoutingReason
from tests.gateway.fake_fleet import BLOCK_SIZE, MAX_LOAD_DELTA, FakeFleet, ManualClock

PROMPT = tuple(range(1, 41))
NUM_BLOCKS = (len(PROMPT) + 1) // BLOCK_SIZE
COUNT = OWN_TOKENS_COUNT + EVICTED_TOKENS_COUNT
"""The cost of computing a token, if all replicas have computed the same number of tokens."""


def fleet(policy: str, num_replicas: int = 3) -> FakeFleet:
    world = FakeFleet(num_replicas, policy=policy)
    world.connect(*world.replicas)
    return world


def route_of(mailbox: Mailbox) -> RoutingDecision:
    (route,) = mailbox.routes
    return route


def finish(world: FakeFleet, name: str, index: int = 0) -> None:
    replica = world.replicas[name]
    replica.finished(world.handle(replica, world.has(name)[index]), Finish(FinishReason.STOP))


def report(world: FakeFleet, name: str, num_requests: int = 0, num_tokens: int = 0) -> None:
    replica = world.replicas[name]
    load = replica.load
    replica.load_changed(
        ReplicaLoad(
            load.num_requests + num_requests,
            load.num_uncomputed_tokens + num_tokens,
            1e-3,
            1e-4,
            num_other_requests=num_requests,
        )
    )


# The policies that do not use prefix caches.


def test_an_unknown_policy_is_refused_by_name() -> None:
    parts = RoutingParts(random.Random(0), ManualClock(), FakeFleet(), 4)
    with pytest.raises(InvalidArgument, match="routing_policy must be one of cache-aware, "):
        make_policy("fastest", parts)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_only_replica_that_is_ready_gets_every_sequence(policy: str) -> None:
    world = FakeFleet(3, policy=policy)
    world.connect("b")
    assert route_of(world.start()) == RoutingDecision("b", RoutingReason.ONLY, 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_any_policy_uses_every_replica_for_different_prompts(policy: str) -> None:
    world = fleet(policy)
    for number in range(60):
        world.start(prompt=[number] * 20)
    assert {name: bool(world.has(name)) for name in "abc"} == dict.fromkeys("abc", True)


def test_round_robin_takes_turns_in_the_order_of_addresses() -> None:
    world = fleet("round-robin")
    addresses = [route_of(world.start()).address for _ in range(6)]
    assert addresses == ["a", "b", "c", "a", "b", "c"]


def test_round_robin_goes_on_where_a_replica_is_lost() -> None:
    world = fleet("round-robin")
    assert route_of(world.start()).address == "a"
    world.replicas["b"].closed("killed")
    assert [route_of(world.start()).address for _ in range(3)] == ["c", "a", "c"]


def test_least_loaded_counts_the_requests_of_other_gateways() -> None:
    world = fleet("least-loaded", 2)
    report(world, "a", num_requests=3)
    for _ in range(3):
        assert route_of(world.start()).address == "b"


def test_of_two_random_replicas_the_less_loaded_one_is_taken() -> None:
    world = fleet("power-of-two")
    report(world, "a", num_requests=50)
    taken = Counter(route_of(world.start()).address for _ in range(40))
    assert taken["a"] == 0, "of any two replicas the other one has less"
    assert min(taken["b"], taken["c"]) > 0


def test_a_session_stays_where_the_hash_puts_it_until_that_replica_has_too_much() -> None:
    world = fleet("consistent-hash")
    first = route_of(world.start(session_id="s")).address
    finish(world, first)
    assert route_of(world.start(session_id="s")).address == first
    report(world, first, num_requests=20)
    assert route_of(world.start(session_id="s")).address != first


def test_sessions_stay_when_another_replica_is_lost() -> None:
    world = fleet("consistent-hash")
    sessions = [f"session {number}" for number in range(30)]

    def placed() -> dict[str, str]:
        routes = {}
        for session in sessions:
            mailbox = world.start(session_id=session)
            routes[session] = route_of(mailbox).address
            mailbox.close()
        return routes

    before = placed()
    world.replicas["c"].closed("killed")
    after = placed()
    assert {s: a for s, a in before.items() if a != "c"} == {
        s: a for s, a in after.items() if before[s] != "c"
    }


def test_candidates_that_change_with_each_request_cost_no_new_ring() -> None:
    policy = make_policy(
        "consistent-hash", RoutingParts(random.Random(0), ManualClock(), FakeFleet(), 4)
    )
    world = fleet("round-robin", 8)
    mailbox = world.start(session_id="s")
    replicas = list(world.replicas.values())
    began = time.process_time()
    first = policy.choose(mailbox.inflights[0], replicas)
    middle = time.process_time()
    for number in range(100):
        others = [one for at, one in enumerate(replicas) if at != number % 8]
        route = policy.choose(mailbox.inflights[0], others)
        is_first_there = first.address in [one.address for one in others]
        assert (route.address == first.address) is is_first_there
    assert time.process_time() - middle < 10 * (middle - began)


# The cache-aware policy.


def test_a_sequence_goes_where_most_of_its_prompt_is_cached() -> None:
    world = fleet("cache-aware")
    world.directory = {"a": 2, "b": 5}
    route = route_of(world.start(prompt=PROMPT))
    assert (route.address, route.reason) == ("b", RoutingReason.CACHED)
    assert route.num_cached_tokens == 5 * BLOCK_SIZE
    assert route.num_candidates == 3


def test_a_queue_that_takes_longer_than_the_prefix_sends_it_elsewhere() -> None:
    world = fleet("cache-aware", 2)
    world.directory = {"a": 5}
    report(world, "a", num_tokens=(5 * COUNT - 3) * BLOCK_SIZE)
    report(world, "b")
    assert route_of(world.start(prompt=PROMPT)).address == "a"
    world = fleet("cache-aware", 2)
    world.directory = {"a": 5}
    report(world, "a", num_tokens=(5 * COUNT + 3) * BLOCK_SIZE)
    report(world, "b")
    route = route_of(world.start(prompt=PROMPT))
    assert (route.address, route.reason) == ("b", RoutingReason.CHEAPEST)


def compute(world: FakeFleet, name: str, num_tokens: int) -> None:
    others = [other for other in world.replicas if other != name]
    world.replicas[name].load.clear()
    for other in others:
        report(world, other, num_requests=MAX_LOAD_DELTA + 1)
    route = route_of(world.start(prompt=tuple(range(num_tokens))))
    assert route.address == name
    replica = world.replicas[name]
    handle = world.handle(replica, world.has(name)[-1])
    replica.admitted(handle, 0)
    replica.finished(handle, Finish(FinishReason.STOP))
    for other in others:
        report(world, other)


def test_what_is_new_goes_where_less_was_computed_lately() -> None:
    """A new prompt is sent to the replica that has computed fewer tokens lately, because it evicts
    fewer blocks there. A cached prompt is sent to the replica that has it cached.
    """
    world = fleet("cache-aware", 2)
    compute(world, "a", 4 * FEW_TOKENS)
    for number in range(1, 11):
        new = tuple(range(100 * number, 100 * number + len(PROMPT)))
        assert route_of(world.start(prompt=new)).address == "b"
        finish(world, "b")
    world.directory = {"a": NUM_BLOCKS}
    assert route_of(world.start(prompt=PROMPT)).address == "a"


def test_few_tokens_evict_little() -> None:
    """A replica that has computed few tokens also gets the conversation's next turn."""
    world = fleet("cache-aware", 2)
    compute(world, "a", FEW_TOKENS // 64)
    world.directory = {"a": 2}
    assert route_of(world.start(prompt=PROMPT)).address == "a"


def test_a_replica_far_above_the_least_loaded_gets_nothing_whatever_it_has_cached() -> None:
    world = fleet("cache-aware", 2)
    world.directory = {"a": NUM_BLOCKS}
    report(world, "a", num_requests=MAX_LOAD_DELTA)
    report(world, "b")
    assert route_of(world.start(prompt=PROMPT)).address == "a"
    finish(world, "a")
    report(world, "a", num_requests=MAX_LOAD_DELTA + 1)
    assert route_of(world.start(prompt=PROMPT)).address == "b"


def test_a_burst_with_one_new_prefix_meets_at_one_replica() -> None:
    world = fleet("cache-aware")
    for name in "abc":
        report(world, name)
    first = route_of(world.start(prompt=PROMPT))
    assert first.num_cached_tokens == 0
    for _ in range(3):
        route = route_of(world.start(prompt=PROMPT))
        assert (route.address, route.reason) == (first.address, RoutingReason.CACHED)
        assert route.num_cached_tokens == NUM_BLOCKS * BLOCK_SIZE


def test_what_was_sent_is_not_expected_to_be_cached_after_the_session_ends() -> None:
    world = fleet("cache-aware", 2)
    mailbox = world.start(prompt=PROMPT)
    name = route_of(mailbox).address
    mailbox.close()
    world.replicas[name].closed("killed")
    world.connect(name)
    assert route_of(world.start(prompt=PROMPT)).num_cached_tokens == 0


def test_a_hot_prefix_spreads_when_its_replica_has_twice_the_load() -> None:
    world = FakeFleet(2, policy="cache-aware", max_load_delta=100)
    world.connect("a", "b")
    world.directory = {"a": NUM_BLOCKS}
    report(world, "a")
    report(world, "b")
    routes = [route_of(world.start(prompt=PROMPT)) for _ in range(SPREAD_MIN_SHARING + 1)]
    assert [route.address for route in routes] == ["a"] * SPREAD_MIN_SHARING + ["b"]
    assert routes[-1].reason is RoutingReason.SPREAD


def test_what_few_requests_share_stays_where_it_is_cached_under_twice_the_load() -> None:
    world = FakeFleet(2, policy="cache-aware", max_load_delta=100)
    world.connect("a", "b")
    world.directory = {"a": NUM_BLOCKS}
    report(world, "a", num_requests=2 * SPREAD_MIN_SHARING)
    report(world, "b")
    routes = [route_of(world.start(prompt=PROMPT)) for _ in range(SPREAD_MIN_SHARING)]
    assert {(route.address, route.reason) for route in routes} == {("a", RoutingReason.CACHED)}


def test_a_prefix_is_no_longer_hot_when_its_requests_have_ended() -> None:
    world = FakeFleet(2, policy="cache-aware", max_load_delta=100)
    world.connect("a", "b")
    world.directory = {"a": NUM_BLOCKS}
    report(world, "a")
    report(world, "b")
    for _ in range(SPREAD_MIN_SHARING):
        world.start(prompt=PROMPT)
    finish(world, "a")
    assert route_of(world.start(prompt=PROMPT)).address == "a"


def test_a_session_stays_at_its_replica_where_that_costs_little_more() -> None:
    world = fleet("cache-aware", 2)
    first = route_of(world.start(prompt=PROMPT, session_id="s")).address
    finish(world, first)
    world.clock.advance(10)
    (other,) = {"a", "b"} - {first}
    report(world, other)
    report(world, first, num_tokens=2 * COUNT)
    route = route_of(world.start(prompt=PROMPT, session_id="s"))
    assert (route.address, route.reason) == (first, RoutingReason.AFFINITY)
    finish(world, first)
    world.clock.advance(10)
    report(world, first, num_tokens=5 * COUNT)
    assert route_of(world.start(prompt=PROMPT, session_id="s")).address == other


def test_predictions_that_prove_wrong_are_not_used_and_are_used_again_when_they_hold() -> None:
    world = fleet("cache-aware", 2)
    world.directory = {"a": NUM_BLOCKS}
    report(world, "a", num_tokens=1)
    report(world, "b")

    def serve(share_cached: float) -> RoutingDecision:
        mailbox = world.start(prompt=PROMPT)
        (inflight,) = mailbox.inflights
        route = route_of(mailbox)
        replica = world.replicas[route.address]
        handle = world.handle(replica, inflight)
        replica.admitted(handle, int(share_cached * route.num_cached_tokens))
        replica.finished(handle, Finish(FinishReason.STOP))
        world.clock.advance(10)
        return route

    routes = [serve(0.0) for _ in range(20)]
    assert routes[0].address == "a"
    assert routes[-1].address == "b", "a has more to do, and what it has cached does not count"
    world.replicas["b"].closed("killed")
    world.directory["b"] = 0
    trust = world.replicas["a"].load.trust
    for _ in range(30):
        world.replicas["a"].load.sent(
            9, world.start().inflights[0], RoutingDecision("a", RoutingReason.ONLY, 1, 20)
        )
        world.replicas["a"].load.admitted(9, 20, BLOCK_SIZE, 0.0)
    assert trust < 0.5 < world.replicas["a"].load.trust


def test_embedded_prompts_and_prompts_shorter_than_a_block_are_routed_by_load() -> None:
    world = fleet("cache-aware", 2)
    world.directory = {"a": NUM_BLOCKS}
    report(world, "a", num_tokens=1)
    report(world, "b")
    assert route_of(world.start(prompt=[1])).address == "b"


# Parts of the cache-aware policy.


@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=200),
    st.integers(1, 7),
    st.text(max_size=3),
    st.integers(0, 200),
)
def test_keys_are_those_of_the_chain_however_often_parts_of_it_were_seen(
    tokens: list[int], block_size: int, salt: str, cut: int
) -> None:
    chain_keys = ChainKeys(max_segments=3)
    for prompt in (tokens[:cut], tokens, tokens[:cut] + tokens, tokens):
        expected = block_keys(hash_full_blocks(b"root", prompt, block_size, cache_salt=salt))
        assert chain_keys.of(b"root", prompt, block_size, salt) == expected


def test_of_a_chain_of_smaller_units_each_block_has_the_key_of_its_last() -> None:
    tokens, chain_keys = list(range(70)), ChainKeys()
    units = block_keys(hash_full_blocks(b"root", tokens, 2, cache_salt="salt"))
    assert chain_keys.of(b"root", tokens, 4, "salt", 2) == units[1:34:2]
    # With blocks of 4 tokens, the chain of the same tokens has other keys.
    whole = block_keys(hash_full_blocks(b"root", tokens, 4, cache_salt="salt"))
    assert chain_keys.of(b"root", tokens, 4, "salt") == whole


@given(st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=5), st.lists(st.integers(0, 3)))
def test_the_depth_of_what_was_sent_is_the_longest_common_beginning(
    sent: list[list[int]], asked: list[int]
) -> None:
    def chain(values: list[int]) -> list[int]:
        """A key for each prefix of a list. Equal prefixes have equal keys."""
        return [hash(tuple(values[: end + 1])) for end in range(len(values))]

    recent = RecentPrefixes()
    for values in sent:
        recent.add(chain(values), 0.0)
    common = 0
    for values in sent:
        same = 0
        while same < min(len(values), len(asked)) and values[same] == asked[same]:
            same += 1
        common = max(common, same)
    assert recent.depth(chain(asked), 0.0) == common
    for known in range(len(asked) + 1):
        assert recent.depth(chain(asked), 0.0, known) == max(common, known)


def test_of_what_was_sent_only_the_blocks_that_are_not_known_to_be_cached_are_kept() -> None:
    recent = RecentPrefixes()
    recent.add([1, 2, 3, 4], 0.0, known_depth=2)
    assert recent.depth([1, 2, 3, 4, 5], 0.0, known_depth=2) == 4
    assert recent.depth([1, 2, 3, 9], 0.0, known_depth=3) == 3
    assert recent.depth([1, 2, 3, 4], 0.0) == 0, "the first ones are no longer cached"


def test_what_was_sent_is_forgotten_after_two_to_four_seconds() -> None:
    recent = RecentPrefixes()
    recent.add([1, 2], 0.5)
    assert recent.depth([1, 2, 3], 0.5 + MIN_SECONDS) == 2
    assert recent.depth([1, 2, 3], 0.5 + 2 * MIN_SECONDS) == 0
