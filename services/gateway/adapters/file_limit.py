"""How many connections a process may hold, by the files that it may open."""

import logging
import resource

logger = logging.getLogger(__name__)

# For what is no client's connection: listeners, schedulers, tracing, libraries.
_FILES_BESIDES = 128


def connections_within_limit(wanted: int) -> int:
    """Raises the limit of open files as far as it goes, and returns how many connections, of HTTP
    and as many of gRPC, fit below it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return wanted
    possible = max(1, (hard - _FILES_BESIDES) // 2)
    if possible < wanted:
        logger.warning(
            "%d connections are allowed instead of %d: this process may open %d files",
            possible,
            wanted,
            hard,
        )
    return min(possible, wanted)
