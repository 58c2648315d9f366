"""What the replicas do at present, for people who look: asked of the schedulers, given as JSON."""
