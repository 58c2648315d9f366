"""Tenants, the owners of API keys. A tenant has limits on its requests and tokens, a fair share of
the replicas, and its own prefix cache. Without this option, or without API keys in the option's
settings, the gateway serves every client.
"""

from services.gateway.options.tenants.option import Tenants
from services.gateway.options.tenants.settings import TenantSettings

__all__ = ["TenantSettings", "Tenants"]
