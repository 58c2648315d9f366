"""Limits of tenants that several gateways count together."""
