"""`python -m benchmarks.scheduler`: compares the processor time that Stepwell and vLLM need to plan
a step.
"""
