"""The tier of host memory, to which the worker offloads blocks that its KV cache evicts."""

from services.worker.options.tier.parts import with_tier

__all__ = ["with_tier"]
