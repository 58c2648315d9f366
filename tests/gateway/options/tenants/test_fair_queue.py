"""The fair queue orders waiting sequences by tenant, weight and priority."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.options.tenants.core.queues.fair_queue import FairQueue
from services.gateway.options.tenants.core.tenant import Tenant

A, B, HEAVY = Tenant("a"), Tenant("b"), Tenant("heavy", weight=3.0)


def anyone(_: Tenant) -> bool:
    return True


def filled(counts: dict[Tenant, int]) -> FairQueue[str]:
    """A queue with `counts` items of each tenant. The items of tenant "a" are "a0", "a1", ..."""
    queue: FairQueue[str] = FairQueue()
    for tenant, count in counts.items():
        for number in range(count):
            queue.add(tenant, (0, number), f"{tenant.caller_id}{number}")
    return queue


def take_all(queue: FairQueue[str], costs: dict[Tenant, float]) -> list[str]:
    """Takes all items in order. For each item, charges the cost in `costs` to the item's tenant."""
    by_name = {tenant.caller_id: tenant for tenant in costs}
    taken = []
    while (item := queue.take(anyone)) is not None:
        tenant = by_name[item.rstrip("0123456789")]
        queue.charge(tenant, costs[tenant])
        taken.append(item)
    return taken


def test_tenants_of_equal_weight_take_turns() -> None:
    taken = take_all(filled({A: 3, B: 3}), {A: 10, B: 10})
    assert taken == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_a_tenant_of_three_times_the_weight_gets_three_times_as_much() -> None:
    taken = take_all(filled({A: 2, HEAVY: 6}), {A: 10, HEAVY: 10})
    assert [item.rstrip("0123456789") for item in taken] == [*["a", "heavy", "heavy", "heavy"] * 2]


def test_tokens_are_shared_and_not_requests() -> None:
    """Requests of tenant A cost four times as many tokens as requests of tenant B."""
    taken = take_all(filled({A: 2, B: 8}), {A: 40, B: 10})
    assert taken == ["a0", "b0", "b1", "b2", "b3", "a1", "b4", "b5", "b6", "b7"]


def test_the_lag_of_a_tenant_is_what_it_lacks_of_the_service_of_another_that_waits() -> None:
    queue = filled({A: 1, B: 1, HEAVY: 1})
    queue.charge(A, 100)
    queue.charge(B, 40)
    queue.charge(HEAVY, 60)
    assert dict(queue.lags()) == {A: -60.0, B: 60.0, HEAVY: 240.0}
    queue.remove(A, (0, 0))
    assert dict(queue.lags()) == {A: -60.0, B: -20.0, HEAVY: 60.0}
    queue.remove(B, (0, 0))
    assert dict(queue.lags()) == {A: -80.0, B: -20.0, HEAVY: 0.0}


def test_a_tenant_that_may_not_be_next_is_passed_over() -> None:
    queue = filled({A: 1, B: 1})
    assert queue.take(lambda tenant: tenant == B) == "b0"
    assert queue.take(lambda tenant: tenant == B) is None
    assert queue.take(anyone) == "a0"


def test_what_a_tenant_left_unused_is_lost_to_it_but_for_its_credit() -> None:
    queue = filled({A: 4})
    for _ in range(4):
        queue.take(anyone)
        queue.charge(A, 10)
    queue.add(A, (0, 9), "a9")
    for number in range(3):
        queue.add(B, (0, number), f"b{number}", credit_tokens=20)
    assert take_all(queue, {A: 10, B: 10}) == ["b0", "b1", "b2", "a9"], (
        "the last of the other was taken at 30, and so it begins at 10"
    )


def test_what_was_charged_too_much_is_given_back() -> None:
    queue = filled({A: 2, B: 2})
    assert [queue.take(anyone), queue.take(anyone)] == ["a0", "b0"]
    queue.charge(A, 50)
    queue.charge(B, 40)
    queue.charge(A, -20)
    assert queue.take(anyone) == "a1"


def test_an_item_that_is_removed_is_not_taken() -> None:
    queue = filled({A: 3})
    queue.remove(A, (0, 1))
    assert (len(queue), list(queue)) == (2, ["a0", "a2"])
    with pytest.raises(KeyError):
        queue.remove(A, (0, 1))
    assert take_all(queue, {A: 1}) == ["a0", "a2"]


WEIGHTS = st.sampled_from([0.5, 1.0, 2.0, 5.0])
COSTS = st.integers(min_value=1, max_value=100)


@given(st.lists(WEIGHTS, min_size=2, max_size=5), st.data())
def test_tenants_that_always_wait_get_their_shares_within_one_request(
    weights: list[float], data: st.DataObject
) -> None:
    """No tenant is ever ahead of another by more than the cost of one of its own requests."""
    tenants = [Tenant(str(number), weight) for number, weight in enumerate(weights)]
    queue: FairQueue[int] = FairQueue()
    for index, tenant in enumerate(tenants):
        for number in range(30):
            queue.add(tenant, (0, number), index)
    served = [0.0] * len(tenants)
    largest = [0.0] * len(tenants)
    for _ in range(29):
        index = queue.take(anyone)
        assert index is not None
        cost = data.draw(COSTS)
        queue.charge(tenants[index], cost)
        served[index] += cost / weights[index]
        largest[index] = max(largest[index], cost / weights[index])
        for one in range(len(tenants)):
            for other in range(len(tenants)):
                assert served[one] - served[other] <= largest[one] + 1e-9


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(-2, 2), COSTS, st.booleans()),
        min_size=1,
        max_size=60,
    )
)
def test_no_tenant_starves_and_nothing_is_lost_repeated_or_reordered(
    steps: list[tuple[int, int, int, bool]],
) -> None:
    """A tenant's requests leave the queue by priority, and then in order of arrival."""
    queue: FairQueue[tuple[int, int]] = FairQueue()
    waiting: dict[int, list[tuple[int, int]]] = defaultdict(list)
    taken: Counter[int] = Counter()
    for number, (index, priority, cost, takes) in enumerate(steps):
        queue.add(Tenant(str(index)), (priority, number), (index, number))
        waiting[index].append((priority, number))
        if takes:
            item = queue.take(anyone)
            assert item is not None, "there is always one to take while one waits"
            queue.charge(Tenant(str(item[0])), cost)
            assert item[1] == min(waiting[item[0]])[1]
            waiting[item[0]].remove(min(waiting[item[0]]))
            taken[item[1]] += 1
    assert len(queue) == sum(map(len, waiting.values()))
    while (item := queue.take(anyone)) is not None:
        queue.charge(Tenant(str(item[0])), 1)
        taken[item[1]] += 1
    assert taken == Counter(range(len(steps)))


@given(st.lists(COSTS, min_size=20, max_size=60), st.floats(min_value=0, max_value=200))
def test_a_tenant_that_waits_is_next_before_the_others_get_much_more(
    costs: list[int], credit: float
) -> None:
    """Before the first request of the new tenant B, tenant A gets at most one request's cost."""
    queue: FairQueue[str] = FairQueue()
    for number in range(len(costs) + 1):
        queue.add(A, (0, number), "a")
    for cost in costs[:10]:
        queue.take(anyone)
        queue.charge(A, cost)
    queue.add(B, (0, 1000), "b", credit_tokens=credit)
    served = 0
    for cost in costs[10:]:
        if queue.take(anyone) == "b":
            break
        queue.charge(A, cost)
        served += cost
    else:
        raise AssertionError("it is never next")
    assert served <= max(costs), "it began at what the other one had had before its last request"
