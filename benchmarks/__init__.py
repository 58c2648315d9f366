"""Measurements: every number that the project quotes is produced by a program in this package."""

import services  # noqa: F401 - before grpc, as in the services' own processes
