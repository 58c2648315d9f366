"""The parts of a worker. Each is built from the settings and from earlier parts."""
