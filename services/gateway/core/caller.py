"""The caller of a request: its identity and its rights."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller without limits. Callers with different ids cannot see each other's requests. If
    clients need API keys, callers are objects of the subclass Tenant, which may have limits.
    """

    caller_id: str
    weight: float = 1.0
    """The weight of the caller in fair queueing, relative to the weights of other callers."""
    max_retained_share: float = 1.0
    """Maximum fraction of a replica's KV blocks that may be retained for the caller's agent
    programs (series of requests with tool calls between them) while a program's tool runs.
    """

    def may_use(self, _model: str) -> bool:
        return True

    def check_model(self, model: str) -> None:
        """Raises PermissionDenied if the caller may not use the model."""

    def effective_priority(self, priority: int) -> int:
        """Returns the priority of a request whose client requested `priority`."""
        return priority

    def effective_cache_salt(self, cache_salt: str) -> str:
        """Returns the cache salt of a request whose client set `cache_salt`."""
        return cache_salt


ANYONE = Caller("")
"""The caller of all requests if clients need no API keys."""
