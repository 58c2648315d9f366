"""`python -m benchmarks.scheduler`: what planning a step costs, beside vLLM."""
