"""Programs for measurements. They produce every number that the project quotes."""

import services  # noqa: F401 - before grpc, as in the services' own processes
