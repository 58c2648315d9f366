from collections import OrderedDict

from services.common.request.structured_outputs import KEPT_GRAMMARS, StructuredOutputs

MAX_KNOWN = KEPT_GRAMMARS // 2
"""Limit on the number of recorded grammars. Workers store twice as many, because they may use
grammars in another order, for example when preempted requests are admitted again. If a worker has
dropped a recorded grammar anyway, it compiles the grammar again when the request runs.
"""


class PreparedGrammars:
    """The most recently used grammars that all workers have compiled."""

    def __init__(self) -> None:
        self._known: OrderedDict[StructuredOutputs, None] = OrderedDict()

    def has(self, wanted: StructuredOutputs) -> bool:
        """Whether the workers have a grammar. Marks the grammar as just used."""
        if wanted in self._known:
            self._known.move_to_end(wanted)
            return True
        return False

    def add(self, wanted: StructuredOutputs) -> None:
        self._known[wanted] = None
        self._known.move_to_end(wanted)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def forget(self) -> None:
        """Removes all grammars, because a worker is a new process."""
        self._known.clear()
