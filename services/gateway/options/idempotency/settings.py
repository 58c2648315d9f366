"""Settings of requests with an idempotency key."""

from dataclasses import dataclass

from services.common.process.settings import at_least, setting
from services.gateway.options.idempotency.core.keyed_requests import KeyLimits


@dataclass(frozen=True, kw_only=True)
class IdempotencySettings:
    """The part of GatewaySettings that concerns requests with an idempotency key."""

    idempotency_linger_seconds: float = setting(
        30.0,
        doc="time for which an answer to a request with an idempotency key is generated further "
        "while no client reads the answer. Then the generation stops until a client sends the "
        "request again",
        check=at_least(0),
    )
    idempotency_max_detached: int = setting(
        64,
        doc="answers with an idempotency key that are generated at once without a client; if one "
        "more loses its client, the generation of the oldest one stops",
        check=at_least(0),
    )
    idempotency_retention_seconds: float = setting(
        600.0,
        doc="time for which the gateway and Redis keep an answer with an idempotency key after the "
        "answer ended or stopped",
        check=at_least(1),
    )
    idempotency_max_bytes: int = setting(
        64 * 2**20,
        doc="memory for answers with an idempotency key: 4 bytes for each token, 8 for each "
        "log-probability, and at most one answer for each 16 KiB; the answers unused for longest "
        "are evicted",
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
