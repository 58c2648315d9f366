"""Platforms: the kinds of devices on which a worker computes, with their memory and processors."""
