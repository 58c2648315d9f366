"""Settings of requests with an idempotency key."""

from dataclasses import dataclass

from services.common.process.settings import at_least, setting
from services.gateway.options.idempotency.core.keyed_requests import KeyLimits


@dataclass(frozen=True, kw_only=True)
class IdempotencySettings:
    """The part of GatewaySettings that concerns requests with an idempotency key."""

    idempotency_linger_seconds: float = setting(
        30.0,
        doc="how long the answer of a request with an idempotency key goes on while no client "
        "reads it; it stops then, and goes on when the client comes back",
        check=at_least(0),
    )
    idempotency_max_detached: int = setting(
        64,
        doc="answers that go on so at once; for a further one the first is stopped",
        check=at_least(0),
    )
    idempotency_retention_seconds: float = setting(
        600.0,
        doc="how long such an answer is remembered after it ended or stopped, here and in Redis",
        check=at_least(1),
    )
    idempotency_max_bytes: int = setting(
        64 * 2**20,
        doc="bytes of such answers, 4 for each token and 8 for each log-probability, and an answer "
        "for each 16 KiB; those unused for longest are forgotten",
        check=at_least(2**14),
    )

    @property
    def key_limits(self) -> KeyLimits:
        return KeyLimits(
            self.idempotency_linger_seconds,
            self.idempotency_max_detached,
            self.idempotency_retention_seconds,
            self.idempotency_max_bytes // 2**14,
            self.idempotency_max_bytes,
        )
