"""`stepwell deploy`: brings a compose file up, breaks its containers and watches them heal."""

from services.cli.deploy.command import main

__all__ = ["main"]
