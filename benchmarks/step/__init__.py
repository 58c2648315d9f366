"""`python -m benchmarks.step`: what a step costs around a worker that computes nothing."""
