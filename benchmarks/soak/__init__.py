"""`python -m benchmarks.soak COMMAND`: services under load, faults and attacks, for long."""
