"""Idempotent requests. If a client repeats a request with the same idempotency key, the answer is
generated only once. The IETF draft "The Idempotency-Key HTTP Header Field" describes the key. In
the draft, a request that is repeated while the first request runs is refused. Here, the repeated
request gets the first request's answer from the beginning.
"""

from services.gateway.options.idempotency.option import Idempotency
from services.gateway.options.idempotency.settings import IdempotencySettings

__all__ = ["Idempotency", "IdempotencySettings"]
