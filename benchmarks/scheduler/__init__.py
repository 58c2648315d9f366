"""`python -m benchmarks.scheduler`: measures the cost of planning a step, beside vLLM."""
