"""C++ for the CPU, compiled on the machine where the worker runs, and its Python side."""
