"""Queries schedulers for the replicas' activity, and formats it as JSON for displays."""
