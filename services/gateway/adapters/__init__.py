"""How the gateway's core meets HTTP, gRPC, schedulers, a tokenizer and telemetry."""
