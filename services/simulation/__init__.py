"""Simulations of the services: of their cores alone, and of all of them in virtual time."""
