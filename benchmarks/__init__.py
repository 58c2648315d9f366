"""Measurements: every number the project quotes comes from a program here."""

import services  # noqa: F401 - before grpc, as in the services' own processes
