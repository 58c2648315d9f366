"""Tenants' limits that several gateways count together."""
