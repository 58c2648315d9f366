"""Tensor and pipeline parallelism: each rank has a part of the model and runs all steps."""
