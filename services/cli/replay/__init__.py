"""`stepwell replay`: drives the scheduler and the pool again, from a scenario or a step log."""

from services.cli.replay.command import main

__all__ = ["main"]
