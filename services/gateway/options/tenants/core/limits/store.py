from typing import Protocol

from services.gateway.options.tenants.core.limits.rule import Change, LimitSet, Standing


class LimitStore(Protocol):
    """Counts tenants' requests and tokens by the rule in
    `services.gateway.options.tenants.core.limits.rule`.
    """

    async def take(self, limits: LimitSet, change: Change) -> Standing:
        """Applies a change, or refuses it without any effect. Never fails, and waits for at most a
        few hundredths of a second.
        """
        ...

    def give_back(self, limits: LimitSet, change: Change) -> None:
        """Applies a change whose `must_fit` is false. It may be applied later."""
        ...

    async def run(self) -> None: ...
