"""The `stepwell` command."""

DEFAULT_URL = "http://127.0.0.1:8000"
"""The default URL of the gateway's HTTP API."""
