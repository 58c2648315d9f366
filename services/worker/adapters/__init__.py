"""The worker's edge: its contract, its tracing, the machine it runs on."""
