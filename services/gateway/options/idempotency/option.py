"""The option that adds idempotency keys to the gateway."""

from collections.abc import Mapping, Sequence

from prometheus_client.registry import Collector

from services.common.errors import StepwellError
from services.common.redis.connection import RedisConnection
from services.gateway.adapters.http.exchange.route import RequestHeader
from services.gateway.adapters.http.openapi.errors import ErrorAnswer
from services.gateway.adapters.telemetry.request_record import RequestRecord
from services.gateway.core.caller import Caller
from services.gateway.core.request.generation import Generation
from services.gateway.options.idempotency.core.key import (
    FIELD,
    MAX_LENGTH,
    KeyReused,
    idempotency_key,
)
from services.gateway.options.idempotency.core.keyed_requests import KeyedRequests
from services.gateway.options.idempotency.core.sharing import Sharing, SharingTimes
from services.gateway.options.idempotency.metrics import SPECS, KeyedCollector
from services.gateway.options.idempotency.redis_journal import RedisJournal
from services.gateway.options.idempotency.settings import IdempotencySettings
from services.gateway.options.option import Option, OptionParts

_NAME = FIELD.lower()
_WAIT_REASON = "idempotency_key"


class Idempotency(Option):
    """Generates only one answer to all requests with one idempotency key."""

    metric_specs = SPECS
    request_headers = (
        RequestHeader(
            FIELD,
            "A key for this request. If the request is sent again with the same key, its answer is "
            "not generated again.",
            {"type": "string", "minLength": 1, "maxLength": MAX_LENGTH},
            {
                KeyReused.http_status: ErrorAnswer(
                    "KeyReused", "The idempotency key was used before for another request."
                )
            },
        ),
    )

    def __init__(self, settings: IdempotencySettings, parts: OptionParts) -> None:
        """If Redis is configured, all gateways share their answers through Redis."""
        self.keyed_requests = KeyedRequests(
            parts.inference,
            parts.engine,
            parts.clock,
            settings.key_limits,
            _make_sharing(parts, settings.idempotency_retention_seconds),
        )

    @property
    def collectors(self) -> Sequence[Collector]:
        return (KeyedCollector(self.keyed_requests),)

    def needs_room(self, headers: Mapping[str, str], caller: Caller) -> bool:
        key = idempotency_key(headers.get(_NAME), caller)
        return key is None or not self.keyed_requests.knows(key)

    async def before_queue(
        self, generation: Generation, record: RequestRecord, api: str
    ) -> Generation:
        """Returns a Generation that reads the key's answer. A request for vectors is computed each
        time.
        """
        key = idempotency_key(record.headers.get(_NAME), record.caller)
        if key is None or generation.request.pooling is not None:
            return generation
        record.wait(_WAIT_REASON)
        return await self.keyed_requests.attach(generation, key, api)

    async def run(self) -> None:
        await self.keyed_requests.run()

    async def close(self, error: StepwellError) -> None:
        await self.keyed_requests.close(error)


def _make_sharing(parts: OptionParts, retention_seconds: float) -> Sharing | None:
    """Makes the sharing of answers through Redis, or returns None if Redis is not configured.
    Raises SettingError if the package for Redis is missing.
    """
    if parts.redis_url is None:
        return None
    times = SharingTimes()
    journal = RedisJournal(
        RedisConnection(parts.redis_url),
        parts.gateway_id,
        lease_seconds=times.lease_seconds,
        retention_seconds=retention_seconds,
    )
    return Sharing(journal, parts.gateway_id, parts.clock, times)
