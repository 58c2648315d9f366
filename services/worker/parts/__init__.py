"""The parts of a worker, each built from the settings and from the parts built before it."""
