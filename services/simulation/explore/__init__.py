"""Searches for faults: all services in one process, in virtual time, under a seeded load."""
