"""The interface of stores that count limits."""

from typing import Protocol

from services.gateway.core.limits.rule import Change, LimitSet, Standing


class LimitStore(Protocol):
    """Counts tenants' requests and tokens by `services.gateway.core.limits.rule`."""

    async def take(self, limits: LimitSet, change: Change) -> Standing:
        """Applies a change, or refuses it without any effect. Never fails, and waits for at most a
        few hundredths of a second.
        """
        ...

    def give_back(self, limits: LimitSet, change: Change) -> None:
        """Applies a change with `must_fit` false, not necessarily at once."""
        ...

    async def run(self) -> None:
        """Maintains the counts until cancelled."""
        ...
