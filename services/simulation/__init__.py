"""Simulates fleets in virtual time: their cores (`laboratory`), or whole services (`explore`)."""
