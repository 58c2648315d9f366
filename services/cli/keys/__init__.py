"""`stepwell keys`: makes, lists and revokes the API keys of tenants."""

from services.cli.keys.command import main

__all__ = ["main"]
