"""CUDA: xFormers, Triton, CUDA graphs, and sampling on the device."""
