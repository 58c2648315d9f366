from collections.abc import Iterable
from typing import TYPE_CHECKING

from services.gateway.core.prefix_index.node_view import NodeView

if TYPE_CHECKING:
    from services.gateway.core.prefix_index.prefix_index import PrefixIndex


class Loading:
    """A snapshot of a node that is loaded in parts. When it is complete, it replaces the node's
    view.
    """

    def __init__(self, index: "PrefixIndex", view: NodeView) -> None:
        self._index = index
        self._view = view

    def add(self, keys: Iterable[int]) -> None:
        self._index.add_keys(self._view, keys)

    def finish(self) -> None:
        self._index.remove(self._view.node)
        self._index.show(self._view)

    def give_up(self) -> None:
        """Discards the loaded keys. The existing view stays in use."""
        self._index.retire(self._view)
