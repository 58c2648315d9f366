"""`python -m benchmarks.routing`: compares routing policies, and times a decision."""
