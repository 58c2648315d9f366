"""The parts of a worker, each made from the settings and what was made before it."""
