"""Whether the workers have compiled the grammar of a request."""

import enum


class GrammarStatus(enum.Enum):
    """The state of the compilation of a request's grammar on the workers."""

    COMPILING = "compiling"
    """Not every worker has compiled the grammar yet. Steps skip the request."""
    READY = "ready"
    FAILED = "failed"
    """The grammar cannot be compiled. The request ends when a step tries to admit it."""
