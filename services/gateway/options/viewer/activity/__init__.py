"""Queries the replicas' current activity from schedulers, and formats it as JSON for displays."""
