"""Keys of an HTTP request's state in its ASGI scope."""

ARRIVED = "arrived"
"""Arrival time of the request, in nanoseconds of `time.perf_counter_ns`."""
HEADERS = "headers"
"""Maps lower-case names to values of the request's headers. Absent until the headers are read."""
ARRIVAL = "arrival"
"""The Arrival of a request that was admitted and counted by its headers."""
CLIENT = "client"
"""The Client that sent the request."""
BODY_WRITER = "body_writer"
"""The BodyWriter of a chunked answer. It bypasses the middlewares that wrap `send`, which change
only the start of an answer.
"""
