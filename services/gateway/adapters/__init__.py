"""Connects the gateway's core to HTTP, gRPC, schedulers, a tokenizer and telemetry."""
