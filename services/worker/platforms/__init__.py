"""Platforms: the devices, memory and processors that a worker uses."""
