"""The simulated device: a worker without weights, whose steps take the predicted time."""
