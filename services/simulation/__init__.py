"""Simulations that run the cores of the services without a network or a model."""
