"""Limits of tenants: requests and tokens per minute, and requests at once."""
