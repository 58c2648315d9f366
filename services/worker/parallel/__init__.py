"""Tensor and pipeline parallelism: ranks that each have a part of one model and run all steps."""
