"""The present activity of the replicas for displays: asked of the schedulers, given as JSON."""
