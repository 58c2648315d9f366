"""Kernels in C++ for the CPU, compiled on the worker's machine, and their Python interface."""
