"""The worker's adapters: its gRPC contract, tracing, metrics, and the compute thread."""
