"""Whether the workers have compiled the grammar that the output of a request must follow."""

import enum


class GrammarStatus(enum.Enum):
    """The state of a grammar's compilation on the workers."""

    COMPILING = "compiling"
    """Not every worker has compiled the grammar yet. Until then, no step admits the request."""
    READY = "ready"
    FAILED = "failed"
    """The grammar cannot be compiled. The request ends when a step tries to admit it."""
