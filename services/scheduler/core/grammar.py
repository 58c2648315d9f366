"""The state of a grammar, which the output of a request must follow and which workers compile."""

import enum


class GrammarStatus(enum.Enum):
    """Whether the workers have compiled the grammar of a request."""

    COMPILING = "compiling"
    """Not every worker has compiled the grammar yet. Until then, no step admits the request."""
    READY = "ready"
    FAILED = "failed"
    """The grammar cannot be compiled. The request ends when a step tries to admit it."""
