"""Compute backends: the interfaces, and one package for each implementation."""
