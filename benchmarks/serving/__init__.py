"""`python -m benchmarks.serving`: what serving through separate services costs."""
