"""The simulated device: a worker without weights. A profile predicts the times of its steps."""
