"""The simulated device: a worker without a model, whose steps take the time that a profile says."""
