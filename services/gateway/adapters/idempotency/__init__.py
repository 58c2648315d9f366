"""Sharing of answers with an idempotency key between gateways."""
