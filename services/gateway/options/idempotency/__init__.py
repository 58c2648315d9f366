"""Idempotent requests: a client may repeat a request under the same key, and it is computed once.

The key is described in the IETF draft "The Idempotency-Key HTTP Header Field". In a deviation from
the draft, a request repeated while the first one runs is not refused: it gets the same answer from
the beginning.
"""

from services.gateway.options.idempotency.option import Idempotency
from services.gateway.options.idempotency.settings import IdempotencySettings

__all__ = ["Idempotency", "IdempotencySettings"]
