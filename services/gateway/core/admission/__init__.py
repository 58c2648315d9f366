"""Which request is next where those of several tenants want more than the replicas can run."""
