"""The state of a request's grammar: whether the workers have compiled it."""

import enum


class GrammarStatus(enum.Enum):
    """The state of the compilation of a request's grammar."""

    COMPILING = "compiling"
    """Not every worker has the grammar yet. The request is passed over."""
    READY = "ready"
    FAILED = "failed"
    """The grammar cannot be compiled. The request ends with the next step that tries to admit it.
    """
