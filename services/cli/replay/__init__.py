"""`stepwell replay`: runs the scheduler and the pool on a step log."""

from services.cli.replay.command import main

__all__ = ["main"]
