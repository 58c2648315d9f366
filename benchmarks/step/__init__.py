"""`python -m benchmarks.step`: measures a step's overhead around a worker that computes nothing."""
