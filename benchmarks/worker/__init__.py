"""`python -m benchmarks.worker`: what a worker computes on a CPU, beside other engines."""
