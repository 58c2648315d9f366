"""`stepwell simulate`: compares policies on simulated fleets."""

from services.cli.simulate.command import main

__all__ = ["main"]
