"""Compares simulations with real runs of the services."""
