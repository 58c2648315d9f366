"""`python -m benchmarks.routing`: what each routing policy gives, and what a decision costs."""
