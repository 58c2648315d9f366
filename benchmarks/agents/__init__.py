"""`python -m benchmarks.agents`: compares policies on agents' programs."""
