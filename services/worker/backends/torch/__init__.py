"""Compute in plain torch, on every device. Other backends use it as a fallback and in tests."""
