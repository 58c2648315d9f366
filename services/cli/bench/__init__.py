"""`stepwell bench`: sends a load to an OpenAI server and measures it."""

from services.cli.bench.command import main

__all__ = ["main"]
