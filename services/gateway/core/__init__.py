"""The gateway's logic: checking requests, choosing replicas, and converting tokens to text."""
