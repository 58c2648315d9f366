"""`python -m benchmarks.gpu`: checks a worker's correctness on a GPU, and measures its speed."""
