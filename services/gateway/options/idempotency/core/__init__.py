"""Answers that are stored under idempotency keys, and shared between gateways."""
