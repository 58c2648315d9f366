"""The grammars of the requests in a batch, and the masks of their next tokens."""

import numpy as np

from services.common.request.sampling import SamplingParams
from services.worker.backends.arrays import BoolArray, Int32Array, Int64Array
from services.worker.backends.row_sampler import RowMasks
from services.worker.sampling.grammar import GrammarMask, Grammars

_FAILED_ELSEWHERE = "another rank of the worker cannot compute the mask of the next token"


class GrammarRows:
    """The grammars of requests, by the requests' rows in the batch.

    After `draw_first(row)`, tokens of this row may be drawn without a mask. The caller must check
    such tokens with `nonconforming` (see GrammarMask).
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, grammars: Grammars | None) -> None:
        """`grammars` is None if requests cannot have grammars."""
        self._grammars = grammars
        self._of: dict[int, GrammarMask] = {}
        self._words: Int32Array = np.zeros((max_num_seqs, -(-vocab_size // 32)), dtype=np.int32)
        """Memory for the mask of each row of the batch."""
        self._rows: Int64Array = np.full(max_num_seqs, -1)
        """Entry i is i if the batch's row i has a mask, otherwise -1."""
        self._unmasked: set[int] = set()
        """Rows with a grammar but without a mask."""

    def add(self, batch_row: int, params: SamplingParams, output: np.ndarray) -> GrammarMask | None:
        """Adds a request's grammar, if it has one, and advances it over `output`."""
        self._rows[batch_row] = -1
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            raise ValueError("this sampler cannot constrain outputs")
        grammar = self._of[batch_row] = GrammarMask(
            self._grammars, params.structured_outputs, output.tolist(), self._words[batch_row]
        )
        self._rows[batch_row] = batch_row
        return grammar

    def draw_first(self, batch_row: int) -> None:
        """Allows tokens of this row to be drawn without a mask. No effect without a grammar."""
        if batch_row in self._of:
            self._of[batch_row].draws_first = True

    def remove(self, batch_row: int) -> None:
        self._of.pop(batch_row, None)
        self._unmasked.discard(batch_row)

    def get(self, batch_row: int) -> GrammarMask | None:
        return self._of.get(batch_row)

    def have_masks(self, batch_rows: np.ndarray) -> BoolArray:
        have: BoolArray = self._rows[batch_rows] >= 0
        return have

    def masks(self, batch_rows: np.ndarray) -> RowMasks | None:
        """Returns the masks of these rows, or None if no row of the batch has one."""
        if len(self._of) == len(self._unmasked):
            return None
        return RowMasks(self._words, self._rows[batch_rows])

    def nonconforming(self, batch_rows: np.ndarray, token_ids: Int64Array) -> list[int]:
        """Returns the indexes of rows whose tokens were drawn without a mask and do not conform.
        Computes the masks of these rows. Negative token ids, of rows without a sampled token, are
        skipped.
        """
        if not self._unmasked:
            return []
        drawn = enumerate(zip(batch_rows.tolist(), token_ids.tolist(), strict=True))
        return [index for index, (row, token) in drawn if not self._conforms(row, token)]

    def failed(self, batch_rows: np.ndarray) -> list[int]:
        """Returns the indexes of rows whose mask a rank could not compute. Every rank that samples
        these rows must call this method, and gets the same result.
        """
        if self._grammars is None or self._grammars.ranks.size == 1:
            return []
        rows = enumerate(batch_rows.tolist())
        grammars = [(index, self._of[row]) for index, row in rows if row in self._of]
        if not grammars:
            return []
        of_ranks = self._grammars.ranks.exchange([bool(grammar.error) for _, grammar in grammars])
        found = []
        for (index, grammar), failures in zip(grammars, zip(*of_ranks, strict=True), strict=True):
            if any(failures):
                grammar.error = grammar.error or _FAILED_ELSEWHERE
                found.append(index)
        return found

    def errors(self, batch_rows: np.ndarray, indexes: Int32Array) -> dict[int, str]:
        """Maps each of `indexes` to the error of the failed grammar in row batch_rows[index].
        Grammars without an error are absent.
        """
        rows = zip(indexes.tolist(), batch_rows[indexes].tolist(), strict=True)
        return {index: self._of[row].error for index, row in rows if self._of[row].error}

    def append(self, batch_row: int, token_id: int) -> None:
        """Advances the grammar of a row, if any, over its next token."""
        grammar = self._of.get(batch_row)
        if grammar is None:
            return
        grammar.append(token_id)
        if grammar.draws_first:
            self._note_mask(batch_row, is_made=grammar.is_made)

    def _conforms(self, batch_row: int, token_id: int) -> bool:
        if batch_row not in self._unmasked or token_id < 0 or self._of[batch_row].allows(token_id):
            return True
        self._note_mask(batch_row, is_made=True)
        return False

    def _note_mask(self, batch_row: int, *, is_made: bool) -> None:
        self._rows[batch_row] = batch_row if is_made else -1
        if is_made:
            self._unmasked.discard(batch_row)
        else:
            self._unmasked.add(batch_row)
