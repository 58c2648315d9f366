"""`python -m benchmarks.agents`: compares scheduling policies on agents' programs."""
