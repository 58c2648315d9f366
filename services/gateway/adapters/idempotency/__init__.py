"""Where several gateways share the answers of requests with an idempotency key."""
