"""Shows the activity of the replicas: /activity, traces in the gateway's memory, and /ui."""

from services.gateway.options.viewer.option import Viewer
from services.gateway.options.viewer.settings import ViewerSettings

__all__ = ["Viewer", "ViewerSettings"]
