"""Profiles of simulated devices, which the worker and `stepwell simulate` read."""
