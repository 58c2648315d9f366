"""A queue for each tenant, served in proportion to the tenants' weights."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import nlargest
from operator import itemgetter
from typing import Generic, TypeVar

from services.gateway.core.tenant import Tenant

T = TypeVar("T")

Order = tuple[int, int]
"""Priority, then number of arrival, which is unique; the lowest comes first."""

_order: Callable[[tuple[Order, object]], Order] = itemgetter(0)


@dataclass(slots=True)
class _Line(Generic[T]):
    """The queue of one tenant, sorted by order."""

    tenant: Tenant
    served: float = 0.0
    """The virtual token counter: tokens that were charged, divided by the weight."""
    items: list[tuple[Order, T]] = field(default_factory=list)


class FairQueue(Generic[T]):
    """Serves tenants that wait in proportion to their weights, counted in tokens.

    The next item is the first one of the tenant with the lowest virtual token counter. A tenant
    that begins to wait cannot use the service that it left unused before: its counter is raised to
    that of the tenant that was served last, less a credit. The counters are those of Sheng et al.,
    "Fairness in Serving Large Language Models" (OSDI 2024). The credit is not theirs: with it, a
    tenant that asks for little is served first also when some of its requests come together.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line[T]] = {}
        self._served_last = 0.0
        """The counter of the tenant whose item was taken last, before it was charged."""
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[T]:
        """All items; a copy, tenant by tenant."""
        return iter([item for line in self._lines.values() for _, item in line.items])

    def add(self, tenant: Tenant, order: Order, item: T, credit_tokens: float = 0.0) -> None:
        """Adds an item. `credit_tokens` is read only if no other item of the tenant waits."""
        line = self._line(tenant)
        if not line.items:
            line.served = max(line.served, self._served_last - credit_tokens / tenant.weight)
        insort(line.items, (order, item), key=_order)
        self._num_waiting += 1

    def take(self, may_be_next: Callable[[Tenant], bool]) -> T | None:
        """Removes and returns the next item, of the tenants for which `may_be_next` is true; None
        if there is none.
        """
        waiting = [line for line in self._lines.values() if line.items]
        for line in sorted(waiting, key=lambda line: (line.served, line.items[0][0])):
            if may_be_next(line.tenant):
                self._served_last = line.served
                self._num_waiting -= 1
                return line.items.pop(0)[1]
        return None

    def remove(self, tenant: Tenant, order: Order) -> None:
        """Removes the item of that order. Raises KeyError if there is none."""
        items = self._lines[tenant.tenant_id].items
        index = bisect_left(items, order, key=_order)
        if index == len(items) or items[index][0] != order:
            raise KeyError(order)
        del items[index]
        self._num_waiting -= 1

    def charge(self, tenant: Tenant, num_tokens: float) -> None:
        """Adds tokens to the tenant's counter, by its weight; less than 0 corrects a charge."""
        self._line(tenant).served += num_tokens / tenant.weight

    def lags(self) -> Iterator[tuple[Tenant, float]]:
        """For each tenant the difference of the highest counter among the other tenants that wait
        and its own, times its weight, in tokens; 0 if no other one waits.
        """
        waiting = [line for line in self._lines.values() if line.items]
        most = nlargest(2, waiting, key=lambda line: line.served)
        for line in self._lines.values():
            others = [one for one in most if one is not line]
            lag = others[0].served - line.served if others else 0.0
            yield line.tenant, lag * line.tenant.weight

    def forget(self, tenant: Tenant) -> None:
        """Removes the counter of a tenant; does nothing while items of it wait."""
        line = self._lines.get(tenant.tenant_id)
        if line is not None and not line.items:
            del self._lines[tenant.tenant_id]

    def _line(self, tenant: Tenant) -> _Line[T]:
        line = self._lines.get(tenant.tenant_id)
        if line is None:
            line = self._lines[tenant.tenant_id] = _Line(tenant)
        line.tenant = tenant
        return line
