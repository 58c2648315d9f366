"""`stepwell keys`: creates, lists and revokes API keys of tenants."""

from services.cli.keys.command import main

__all__ = ["main"]
