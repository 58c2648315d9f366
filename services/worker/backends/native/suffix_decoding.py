"""Suffix trees in the compiled library: see cpp/suffix_decoding.h."""

import ctypes
import weakref

from services.worker.backends.arrays import Int32Array
from services.worker.backends.native.library import NativeSuffixSettings, SuffixFunctions, address
from services.worker.backends.suffix_decoding import SuffixRules

MAX_RESPONSE_BYTES = 256 << 20
"""Maximum memory of all trees of responses. It suffices for half a million tokens of text that
occurs twice, or six million tokens that occur once.
"""


class NativeSuffixDecoding:
    """SuffixDecoding in C++. `max_bytes` limits the memory of the trees of responses."""

    def __init__(
        self, library: ctypes.CDLL, rules: SuffixRules, max_bytes: int = MAX_RESPONSE_BYTES
    ) -> None:
        self._functions = functions = SuffixFunctions(library)
        settings = NativeSuffixSettings(
            *(rules.max_tree_depth, rules.max_cached_requests, max_bytes),
            *(rules.max_spec_factor, rules.min_token_prob),
        )
        self._trees: int = functions.new(settings)
        weakref.finalize(self, functions.delete, self._trees)
        self._drafts = (ctypes.c_int32 * rules.max_tree_depth)()
        """Buffer for drafts. There are always fewer drafts than the depth of a tree."""
        self._read: set[int] = set()
        """Rows of the batch whose prompts are already in the trees of their requests."""
        self._arrays: tuple[Int32Array, Int32Array] | None = None
        self._addresses = 0, 0, 0
        """The results of `_known` in the last call."""

    @property
    def num_cached(self) -> int:
        """Number of responses in the trees."""
        return int(self._functions.num_cached(self._trees))

    @property
    def cached_bytes(self) -> int:
        """Bytes of the trees of responses."""
        return int(self._functions.cached_bytes(self._trees))

    def enter(self, row: int, key: bytes, num_tokens: int) -> None:
        self._read.discard(row)
        self._functions.enter(self._trees, row, key, len(key), num_tokens)

    def take_in(self, rows: Int32Array, token_ids: Int32Array, num_tokens: Int32Array) -> None:
        known = self._known(token_ids, num_tokens)
        self._functions.take_in(self._trees, *known, rows.tobytes(), len(rows))

    def propose(
        self, row: int, token_ids: Int32Array, num_tokens: Int32Array, most: int
    ) -> list[int]:
        known = self._known(token_ids, num_tokens)
        if row not in self._read:
            self._functions.read(self._trees, *known, row)
            self._read.add(row)
        found = self._functions.propose(self._trees, *known, row, most, self._drafts)
        return self._drafts[:found]

    def _known(self, token_ids: Int32Array, num_tokens: Int32Array) -> tuple[int, int, int]:
        """Returns what the library's functions need: the address of `token_ids`, its row length in
        tokens, and the address of `num_tokens`. Cached, because computing it takes as long as a
        call.
        """
        before = self._arrays
        if before is None or before[0] is not token_ids or before[1] is not num_tokens:
            self._arrays = token_ids, num_tokens
            width = token_ids.strides[0] // token_ids.itemsize
            self._addresses = address(token_ids), width, address(num_tokens)
        return self._addresses

    def leave(self, row: int) -> None:
        self._functions.leave(self._trees, row)

    def clear(self) -> None:
        self._functions.clear(self._trees)
