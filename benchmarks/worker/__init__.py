"""`python -m benchmarks.worker`: measures a worker on a CPU, beside other engines."""
