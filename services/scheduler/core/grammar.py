"""The state of a request's grammar: whether the workers have compiled it."""

import enum


class GrammarStatus(enum.Enum):
    """How far the compilation of a request's grammar is."""

    COMPILING = "compiling"
    """Not every worker has it: the request is passed over."""
    READY = "ready"
    FAILED = "failed"
    """It cannot be compiled: the request ends when the next step looks at it."""
