"""Idempotent requests. A client may repeat a request with the same key, and the request is computed
only once. The IETF draft "The Idempotency-Key HTTP Header Field" describes the key. Unlike in the
draft, a request that is repeated while the first one runs is not refused. It gets the same answer
from the beginning.
"""

from services.gateway.options.idempotency.option import Idempotency
from services.gateway.options.idempotency.settings import IdempotencySettings

__all__ = ["Idempotency", "IdempotencySettings"]
