"""CUDA: xFormers, Triton and CUDA graphs."""
