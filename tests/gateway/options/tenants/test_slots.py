"""Which tenants may occupy a free slot or must release one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.options.tenants.core.queues.slots import ACTIVE_SECONDS, Slots
from services.gateway.options.tenants.core.tenant import Tenant

A, B, HEAVY = Tenant("a"), Tenant("b"), Tenant("heavy", weight=3.0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def running(counts: dict[Tenant, int], clock: Clock | None = None) -> Slots:
    """Slots that run `counts` sequences of each tenant, whose last requests arrived just now."""
    slots = Slots(clock or Clock())
    for tenant, count in counts.items():
        slots.usage(tenant).num_running = count
    return slots


def may_take(slots: Slots, tenant: Tenant, num_free: int, num_slots: int = 32) -> bool:
    return slots.fair_shares(num_free, num_slots).may_take_slot(slots.usage(tenant))


def to_preempt(slots: Slots, num_free: int = 0, num_slots: int = 32) -> Tenant | None:
    usage = slots.fair_shares(num_free, num_slots).to_preempt()
    return None if usage is None else usage.tenant


def test_a_tenant_alone_may_have_all_slots_and_a_few_ahead() -> None:
    slots = running({A: 32})
    assert [may_take(slots, A, num_free) for num_free in (1, 0, -1, -2)] == [
        True,
        True,
        True,
        False,
    ]


def test_a_slot_is_kept_free_for_a_tenant_below_its_share() -> None:
    slots = running({A: 23, B: 8})
    assert may_take(slots, B, 1)
    assert not may_take(slots, A, 1)
    assert may_take(slots, A, 2)


def test_what_a_tenant_below_its_share_waits_for_is_not_for_one_above() -> None:
    """Tenant B waits for 3 slots within its share of 16. These and one more stay free for it."""
    slots = running({A: 20, B: 8})
    slots.usage(B).num_waiting = 3
    assert [may_take(slots, A, num_free) for num_free in (4, 5)] == [False, True]
    slots.usage(B).num_waiting = 30
    assert [may_take(slots, A, num_free) for num_free in (8, 9)] == [False, True]


def test_no_slot_is_kept_for_a_tenant_that_has_its_share() -> None:
    slots = running({A: 15, B: 16})
    assert may_take(slots, A, 1)
    assert not may_take(slots, B, 1), "the other one is below its share"


def test_shares_go_by_weight() -> None:
    slots = running({A: 8, HEAVY: 23})
    assert (slots.share(A), slots.share(HEAVY)) == (0.25, 0.75)
    assert may_take(slots, HEAVY, 1), "it has less than its 24"
    assert not may_take(slots, A, 1), "it has its 8, and the last is kept for the other"


def test_at_most_one_in_16_slots_is_kept_free() -> None:
    many = {Tenant(f"t{number}"): 0 for number in range(20)}
    slots = running({A: 30, **many})
    assert may_take(slots, A, 3)
    assert not may_take(slots, A, 2)


def test_of_few_slots_none_is_kept_free() -> None:
    slots = running({A: 3, B: 0})
    assert may_take(slots, A, 1, 4)


def test_the_tenant_with_most_above_its_share_gives_back_what_one_below_waits_for() -> None:
    slots = running({A: 20, B: 0, HEAVY: 12})
    assert to_preempt(slots) is None, "no other waits"
    slots.usage(B).num_waiting = 1
    assert to_preempt(slots) is A
    assert to_preempt(slots, num_free=1) is None
    slots.usage(B).num_running = 6
    assert to_preempt(slots) is None, "it has its share"


def test_no_tenant_gives_back_what_is_its_share() -> None:
    slots = running({A: 16, B: 15})
    slots.usage(B).num_waiting = 1
    assert to_preempt(slots) is None


def test_a_tenant_that_lacks_service_may_take_a_little_more_than_its_share() -> None:
    """Tenant B got 4 answers of 128 tokens less than its share."""
    slots = running({A: 16, B: 16})
    slots.usage(B).lag = 4 * 2 * 128.0
    assert may_take(slots, B, 1)
    assert not may_take(slots, A, 1), "it is kept for the other one"
    slots.usage(B).num_waiting = 1
    assert to_preempt(slots) is None, "but none is given back for it"
    slots.usage(B).lag -= 1.0
    assert may_take(slots, A, 1)


def test_what_a_tenant_has_beyond_its_share_stays_its_own_while_it_lacks_service() -> None:
    slots = running({A: 12, B: 20})
    slots.usage(A).num_waiting = 1
    slots.usage(B).lag = 1.0
    assert to_preempt(slots) is None
    slots.usage(B).num_running += 1
    assert to_preempt(slots) is B, "it is more than the square root of its share"
    slots.usage(B).num_running -= 1
    slots.usage(B).lag = 0.0
    assert to_preempt(slots) is B


def test_few_sequences_of_a_tenant_start_at_once() -> None:
    """A tenant with a share of 32 slots may start an eighth as many sequences at once."""
    slots = running({A: 8, B: 3})
    slots.usage(A).num_starting = 3
    assert may_take(slots, A, 53, 64)
    slots.usage(A).num_starting = 4
    assert not may_take(slots, A, 53, 64)
    assert may_take(slots, B, 53, 64)
    slots.usage(B).num_starting = 1
    assert may_take(slots, B, 3, 5)
    slots.usage(B).num_starting = 2
    assert not may_take(slots, B, 3, 5)


@pytest.mark.parametrize(
    ("mean_output_tokens", "num_starting"), [(128.0, 2), (32.0, 3), (16.0, 5), (8.0, 8), (0.0, 8)]
)
def test_as_many_start_as_end_meanwhile(mean_output_tokens: float, num_starting: int) -> None:
    """A tenant has 20 running sequences and a share of 16 slots. It may start as many sequences at
    once as of the 20 end within four steps, but at most 8.
    """
    slots = running({A: 20, B: 3})
    usage = slots.usage(A)
    usage.mean_output_tokens = mean_output_tokens
    usage.num_starting = num_starting - 1
    assert may_take(slots, A, 9)
    usage.num_starting = num_starting
    assert not may_take(slots, A, 9)


def test_nothing_is_given_back_for_what_may_not_start_yet() -> None:
    slots = running({A: 22, B: 10})
    slots.usage(B).num_waiting = 1
    slots.usage(B).num_starting = 2
    assert to_preempt(slots) is None
    slots.usage(B).num_starting = 1
    assert to_preempt(slots) is A


def test_a_tenant_alone_starts_as_many_as_there_are_slots() -> None:
    slots = running({A: 20})
    slots.usage(A).num_starting = 20
    assert may_take(slots, A, 12)


def test_every_tenant_may_have_one_slot() -> None:
    """Eight tenants with equal weights have four slots."""
    many = [Tenant(f"t{number}") for number in range(7)]
    slots = running({A: 2, **dict.fromkeys(many[:2], 1), **dict.fromkeys(many[2:], 0)})
    slots.usage(many[2]).num_waiting = 1
    assert to_preempt(slots, num_slots=4) is A
    slots.usage(A).num_running = 1
    assert to_preempt(slots, num_slots=4) is None


def test_a_tenant_that_asks_no_more_has_no_share() -> None:
    clock = Clock()
    slots = running({A: 31, B: 0}, clock)
    clock.now += ACTIVE_SECONDS + 1
    assert not may_take(slots, A, 1)
    assert slots.drop_idle() == [B]
    assert may_take(slots, A, 1)
    assert slots.share(A) == 1.0


COUNTS = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([0.5, 1.0, 4.0])), min_size=1, max_size=6
)


@given(COUNTS, st.integers(1, 64))
def test_slots_are_never_left_idle_while_only_one_asks_or_one_is_below_its_share(
    counts: list[tuple[int, float]], num_slots: int
) -> None:
    """At most one in 16 slots stays free while a tenant waits."""
    tenants = [Tenant(str(number), weight) for number, (_, weight) in enumerate(counts)]
    slots = running({tenant: count for tenant, (count, _) in zip(tenants, counts, strict=True)})
    num_free = num_slots - sum(count for count, _ in counts)
    below = [
        tenant
        for tenant, (count, _) in zip(tenants, counts, strict=True)
        if count < int(num_slots * slots.share(tenant))
    ]
    for tenant in below if num_free > 0 else []:
        assert may_take(slots, tenant, num_free, num_slots)
    if num_free > num_slots // 16:
        assert all(may_take(slots, tenant, num_free, num_slots) for tenant in tenants)
    if len(tenants) > 1 and num_free <= 0:
        assert not any(may_take(slots, tenant, num_free, num_slots) for tenant in tenants)


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 9), st.sampled_from([0.5, 1.0, 4.0])),
        min_size=2,
        max_size=6,
    ),
    st.integers(1, 64),
)
def test_giving_back_ends_with_a_free_slot_or_with_no_tenant_above_its_share(
    counts: list[tuple[int, int, float]], num_slots: int
) -> None:
    tenants = [Tenant(str(number), weight) for number, (*_, weight) in enumerate(counts)]
    slots = running({})
    for tenant, (num_running, num_waiting, _) in zip(tenants, counts, strict=True):
        usage = slots.usage(tenant)
        usage.num_running, usage.num_waiting = num_running, num_waiting

    def num_free() -> int:
        return num_slots - sum(usage.num_running for usage in slots)

    def at_least(tenant: Tenant) -> int:
        return min(slots.usage(tenant).num_running, int(num_slots * slots.share(tenant)))

    before = {tenant: at_least(tenant) for tenant in tenants}
    while (giver := to_preempt(slots, num_free(), num_slots)) is not None:
        assert num_free() <= 0
        slots.usage(giver).num_running -= 1
        slots.usage(giver).num_waiting += 1
    assert all(slots.usage(tenant).num_running >= count for tenant, count in before.items())


@pytest.mark.parametrize("num_slots", [8, 32, 100])
def test_a_tenant_has_its_share_at_once_while_another_one_floods(num_slots: int) -> None:
    """Tenant A occupies all slots that it may, and then releases tenant B's share."""
    slots = running({A: 0, B: 0})

    def num_free() -> int:
        return num_slots - sum(usage.num_running for usage in slots)

    def take_all(tenant: Tenant) -> None:
        while True:
            slots.usage(tenant).num_waiting = 100
            while to_preempt(slots, num_free(), num_slots) not in (None, tenant):
                slots.usage(A if tenant is B else B).num_running -= 1
            if not may_take(slots, tenant, num_free(), num_slots):
                return
            slots.usage(tenant).num_running += 1

    take_all(A)
    assert slots.usage(A).num_running == num_slots - (num_slots >= 16)
    take_all(B)
    take_all(A)
    assert {usage.num_running for usage in slots} == {num_slots // 2}
