"""Tenants: limits, fair shares and caches are kept apart by them."""

from dataclasses import dataclass

from services.common.errors import PermissionDenied


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of one or more API keys, and what it may use; None is no limit of its own.

    Where requests of several tenants compete, each gets a share in proportion to its `weight`.
    Tokens per minute are counted as prompt tokens that are not cached, and generated ones.
    """

    tenant_id: str
    weight: float = 1.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None
    priority_ceiling: int | None = None
    """No request of it is scheduled with a smaller `priority`, which would run earlier."""
    models: frozenset[str] | None = None
    """The models that the key of the request may ask for; None: all."""
    cache_salt: str = ""
    """Its prompts are cached apart from those of tenants with another one."""

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models

    def check_model(self, model: str) -> None:
        """Raises PermissionDenied for a model that the tenant may not use."""
        if not self.may_use(model):
            raise PermissionDenied(
                f"this API key does not have access to model {model!r}",
                field="model",
                reason="MODEL_NOT_FOUND",
            )

    def effective_priority(self, priority: int) -> int:
        """The priority of a request that asks for this one."""
        ceiling = self.priority_ceiling
        return priority if ceiling is None else max(priority, ceiling)

    def effective_cache_salt(self, cache_salt: str) -> str:
        """The cache salt of a request whose client gave `cache_salt`.

        Salts of clients hold no NUL, so that no client can name what belongs to another tenant.
        """
        if not self.cache_salt:
            return cache_salt
        return f"\0tenant {self.cache_salt}\0{cache_salt}"


ANYONE = Tenant("")
"""The tenant of every request where no keys are asked for."""
