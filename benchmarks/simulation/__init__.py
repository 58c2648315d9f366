"""`python -m benchmarks.simulation`: measures the cost of `stepwell simulate`."""
