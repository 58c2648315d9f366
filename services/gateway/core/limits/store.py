"""The port behind which limits are counted."""

from typing import Protocol

from services.gateway.core.limits.rule import Change, LimitSet, Standing


class LimitStore(Protocol):
    """Counts what tenants take, by `services.gateway.core.limits.rule`."""

    async def take(self, limits: LimitSet, change: Change) -> Standing:
        """Does a change, or refuses it, and changes nothing then. It never fails, and waits for a
        few hundredths of a second at most.
        """
        ...

    def give_back(self, limits: LimitSet, change: Change) -> None:
        """Does a change that need not fit, soon."""
        ...

    async def run(self) -> None:
        """Keeps the counts up until cancelled."""
        ...
