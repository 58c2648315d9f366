"""Describes the fleet for operators: alerts, tenants, refusals, processes, and Redis."""
