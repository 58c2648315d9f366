"""`python -m benchmarks.soak COMMAND`: long runs of the services under load, faults and attacks."""
