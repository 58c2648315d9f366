"""Tenants. Each API key belongs to a tenant. A tenant has limits on its requests and tokens, a fair
share of the replicas, and its own prefix cache. Without this option, or without keys in its
settings, the gateway serves every client.
"""

from services.gateway.options.tenants.option import Tenants
from services.gateway.options.tenants.settings import TenantSettings

__all__ = ["TenantSettings", "Tenants"]
