"""`python -m benchmarks.serving`: measures the cost of serving through separate services."""
