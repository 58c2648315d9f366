"""Tenants. Each has its own limits, a fair share of the replicas, and its own prefix cache."""

from dataclasses import dataclass

from services.common.errors import PermissionDenied
from services.gateway.core.caller import Caller


@dataclass(frozen=True, slots=True)
class Tenant(Caller):
    """The owner of one or more API keys. A limit of None means no limit.

    If requests of several tenants compete, the tenants' shares of the replicas are proportional to
    `weight`. `tokens_per_minute` limits the sum of uncached prompt tokens and generated tokens.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None
    priority_ceiling: int | None = None
    """The smallest `priority` that the tenant's requests can have. Requests with smaller values
    are scheduled earlier.
    """
    models: frozenset[str] | None = None
    """The models that the API key may use. None means all models."""
    cache_salt: str = ""
    """Tenants with different salts do not share cached prompts."""

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models

    def check_model(self, model: str) -> None:
        if not self.may_use(model):
            raise PermissionDenied(
                f"this API key does not have access to model {model!r}",
                field="model",
                reason="MODEL_NOT_FOUND",
            )

    def effective_priority(self, priority: int) -> int:
        ceiling = self.priority_ceiling
        return priority if ceiling is None else max(priority, ceiling)

    def effective_cache_salt(self, cache_salt: str) -> str:
        """Returns the client's salt with the tenant's own salt, if there is one, in front of it.
        Clients' salts cannot contain NUL, so no client can construct the salt of another tenant.
        """
        if not self.cache_salt:
            return cache_salt
        return f"\0tenant {self.cache_salt}\0{cache_salt}"
