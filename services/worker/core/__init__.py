"""The persistent batch and the step that runs over it."""
