"""The replicas' current activity for displays: queried from the schedulers, formatted as JSON."""
