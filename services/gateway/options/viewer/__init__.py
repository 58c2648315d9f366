"""Shows what the replicas do: /activity, traces of requests in the gateway's memory, and /ui."""

from services.gateway.options.viewer.option import Viewer
from services.gateway.options.viewer.settings import ViewerSettings

__all__ = ["Viewer", "ViewerSettings"]
