"""`stepwell profile`: measures a worker's steps, and fits a profile for the simulated device."""

from services.cli.profile.command import main

__all__ = ["main"]
