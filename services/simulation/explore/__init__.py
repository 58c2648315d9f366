"""Searches for defects: all services in one process, in virtual time, under a random load."""
