"""Tensor parallelism: ranks that each hold a part of one model and take every step together."""
