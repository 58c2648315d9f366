"""Queues of tenants, which are served in proportion to the tenants' weights."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import nlargest
from operator import itemgetter
from typing import Generic, TypeVar

from services.gateway.options.tenants.core.tenant import Tenant

T = TypeVar("T")

Order = tuple[int, int]
"""A pair of an item's priority and unique arrival number. The lowest pair is first."""

_order: Callable[[tuple[Order, object]], Order] = itemgetter(0)


@dataclass(slots=True)
class _Line(Generic[T]):
    """The queue of one tenant, sorted by Order."""

    tenant: Tenant
    served: float = 0.0
    """The tenant's virtual token counter: charged tokens divided by the tenant's weight."""
    items: list[tuple[Order, T]] = field(default_factory=list)


class FairQueue(Generic[T]):
    """Serves tenants with waiting items in proportion to their weights, measured in tokens.

    Each tenant has a virtual token counter: its charged tokens divided by its weight. The next item
    is the first item of the tenant with the lowest counter. So that a tenant cannot save up service
    for later, its counter is raised when it adds an item and has no other waiting items: to the
    counter of the tenant served last, minus a credit. With the credit, a tenant with few requests
    is served first even if some of its requests arrive together. The counters, without the credit,
    are from Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line[T]] = {}
        self._served_last = 0.0
        """The counter of the tenant served last, before its last item was charged."""
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[T]:
        """Iterates over a copy of all items, grouped by tenant."""
        return iter([item for line in self._lines.values() for _, item in line.items])

    def add(self, tenant: Tenant, order: Order, item: T, credit_tokens: float = 0.0) -> None:
        """Adds an item. `credit_tokens` has an effect only if the tenant has no waiting items."""
        line = self._line(tenant)
        if not line.items:
            line.served = max(line.served, self._served_last - credit_tokens / tenant.weight)
        insort(line.items, (order, item), key=_order)
        self._num_waiting += 1

    def take(self, may_be_next: Callable[[Tenant], bool]) -> T | None:
        """Removes and returns the next item of the tenants for which `may_be_next` is true, or
        returns None if there is no such item.
        """
        waiting = [line for line in self._lines.values() if line.items]
        for line in sorted(waiting, key=lambda line: (line.served, line.items[0][0])):
            if may_be_next(line.tenant):
                self._served_last = line.served
                self._num_waiting -= 1
                return line.items.pop(0)[1]
        return None

    def remove(self, tenant: Tenant, order: Order) -> None:
        """Removes the tenant's item with this order. Raises KeyError if there is no such item."""
        items = self._lines[tenant.caller_id].items
        index = bisect_left(items, order, key=_order)
        if index == len(items) or items[index][0] != order:
            raise KeyError(order)
        del items[index]
        self._num_waiting -= 1

    def charge(self, tenant: Tenant, num_tokens: float) -> None:
        """Charges tokens to a tenant. A negative number corrects an earlier charge."""
        self._line(tenant).served += num_tokens / tenant.weight

    def lags(self) -> Iterator[tuple[Tenant, float]]:
        """Yields each tenant and its lag in tokens: the highest counter of the other tenants with
        waiting items minus the tenant's own counter, times the tenant's weight. The lag is 0 if no
        other tenant has waiting items.
        """
        waiting = [line for line in self._lines.values() if line.items]
        most = nlargest(2, waiting, key=lambda line: line.served)
        for line in self._lines.values():
            others = [one for one in most if one is not line]
            lag = others[0].served - line.served if others else 0.0
            yield line.tenant, lag * line.tenant.weight

    def forget(self, tenant: Tenant) -> None:
        line = self._lines.get(tenant.caller_id)
        if line is not None and not line.items:
            del self._lines[tenant.caller_id]

    def _line(self, tenant: Tenant) -> _Line[T]:
        line = self._lines.get(tenant.caller_id)
        if line is None:
            line = self._lines[tenant.caller_id] = _Line(tenant)
        line.tenant = tenant
        return line
