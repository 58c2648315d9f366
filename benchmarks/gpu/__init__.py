"""`python -m benchmarks.gpu`: whether a worker is right on a GPU, and how fast it is."""
