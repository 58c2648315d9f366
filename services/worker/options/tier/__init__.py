"""The tier: memory of the worker for blocks that its KV cache evicts."""

from services.worker.options.tier.parts import with_tier

__all__ = ["with_tier"]
