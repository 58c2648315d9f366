"""`stepwell deploy`: starts a compose file, breaks its containers and checks their recovery."""

from services.cli.deploy.command import main

__all__ = ["main"]
