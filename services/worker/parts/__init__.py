"""Builders of a worker's parts: the model, its KV cache, the drafter, and the description."""
