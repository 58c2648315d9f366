"""`python -m benchmarks.scheduler`: compares processor time to plan a step with vLLM's."""
