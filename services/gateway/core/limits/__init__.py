"""Limits of tenants: requests and tokens per minute, and concurrent requests."""
