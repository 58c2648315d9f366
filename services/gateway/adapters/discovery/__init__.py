"""Finds schedulers by the settings, by DNS, and by the registry in Redis."""
