"""Tensor and pipeline parallelism. Each rank has a part of the model and runs all steps."""
