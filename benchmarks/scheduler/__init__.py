"""`python -m benchmarks.scheduler`: compares the processor time of planning a step with vLLM."""
