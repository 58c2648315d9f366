"""`python -m benchmarks.simulation`: measures the processor time of `stepwell simulate`."""
