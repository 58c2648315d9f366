"""`python -m benchmarks.worker`: compares a worker on a CPU with other engines."""
