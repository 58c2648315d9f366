"""Compute on CUDA, with xFormers, Triton and CUDA graphs."""
