"""Which grammars all workers have compiled, so that a request need not wait for their answers."""

from collections import OrderedDict

from services.common.request.structured_outputs import KEPT_GRAMMARS, StructuredOutputs

MAX_KNOWN = KEPT_GRAMMARS // 2
"""Fewer than workers keep: they also use those of requests that enter again after a preemption, in
another order. What a worker has forgotten nevertheless is compiled when its request runs.
"""


class PreparedGrammars:
    """The grammars of the latest requests, which all workers have compiled."""

    def __init__(self) -> None:
        self._known: OrderedDict[StructuredOutputs, None] = OrderedDict()

    def has(self, wanted: StructuredOutputs) -> bool:
        """Whether the workers have a grammar, which counts as used now."""
        if wanted in self._known:
            self._known.move_to_end(wanted)
            return True
        return False

    def add(self, wanted: StructuredOutputs) -> None:
        """All workers have compiled it."""
        self._known[wanted] = None
        self._known.move_to_end(wanted)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def forget(self) -> None:
        """A worker is new."""
        self._known.clear()
