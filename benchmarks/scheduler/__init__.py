"""`python -m benchmarks.scheduler`: compares Stepwell's and vLLM's processor time to plan a
step.
"""
