"""The sampler of the input batch. It draws one token from a row of logits for each request."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np
import torch

from services.common.request.sampling import SamplingParams
from services.worker.backends.arrays import (
    BoolArray,
    Float32Array,
    Float64Array,
    Int32Array,
    Int64Array,
    UInt64Array,
)
from services.worker.backends.row_sampler import REFUSED, UNUSABLE, RowParameters, RowSampler
from services.worker.sampling.edits import LogitEdit, logit_edits
from services.worker.sampling.filters import NUM_ROW_VALUES, filter_values
from services.worker.sampling.grammar import Grammars
from services.worker.sampling.grammar_rows import GrammarRows
from services.worker.sampling.logprobs import LogprobRows, logprob_rows
from services.worker.sampling.numpy_row_sampler import NumpyRowSampler
from services.worker.sampling.philox import SAMPLING_STREAM, random_states

_COPIED_BYTES = 2**23
"""Bytes of logits rows that are copied and edited at a time."""

_NO_ROWS: Int32Array = np.empty(0, np.int32)
_NO_ROWS.flags.writeable = False
_NO_INDEXES: Int64Array = np.empty(0, np.int64)
_NO_INDEXES.flags.writeable = False


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The tokens that one call samples, in the order of its rows."""

    token_ids: Int32Array  # [R]
    logprobs: dict[int, LogprobRows]  # by row, for requests with log-probabilities
    nan_rows: Int32Array  # rows with NaN, or without a finite logit; their token is 0
    refused_rows: Int32Array  # rows whose grammar allows no token; their token is 0
    grammar_errors: dict[int, str] = field(default_factory=dict)
    """Maps rows in `refused_rows` whose grammar failed to the reason of the failure."""


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """The sampling parameters of requests without logit edits. Column i is for row i of the logits.

    R is the number of rows. `parameters` [NUM_ROW_VALUES, R] has the temperatures in its first row,
    and one parameter of filters.py, such as top_k, in each further row. `states` [R, 2]: the random
    states of the draws (see race.py).
    """

    parameters: Float64Array
    states: UInt64Array

    @property
    def temperatures(self) -> Float64Array:
        """The temperatures [R], 0 for greedy requests."""
        temperatures: Float64Array = self.parameters[0]
        return temperatures

    def of(self, rows: slice) -> "SamplingMetadata":
        return SamplingMetadata(self.parameters[:, rows], self.states[rows])


@dataclass(frozen=True, slots=True)
class _Request:
    params: SamplingParams
    edits: tuple[LogitEdit, ...]


class Sampler:
    """Samples for the requests in the rows of a batch, and keeps the state that sampling needs.

    The logits of a row pass these stages, in vLLM's order:

    1. Log-probabilities of the model's logits. For requests with a grammar, they are computed after
       the grammar's mask was applied.
    2. Edits: the grammar, allowed tokens, bad words, min tokens, logit bias, penalties.
    3. Temperature. If it is 0, the best token is selected, with the lowest id among equals, and the
       remaining stages are skipped.
    4. Filters: min-p, top-k, top-p.
    5. The draw, a race of exponentials (race.py). Each exponential is a function of the request's
       seed, the position of the token in its sequence, and the token's id.

    The result of a row does not depend on other rows, bit for bit. So a request samples the same
    tokens alone, in any batch, and after it was removed and added again with its output.

    One call of a RowSampler computes all rows, including masks of grammars. Rows with other edits
    are copied with their mask applied, and are edited one by one. A second call computes stages 3
    to 5 for the copies.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        grammars: Grammars | None = None,
        row_sampler: RowSampler | None = None,
    ) -> None:
        """`grammars`: for requests with `structured_outputs`. `row_sampler`: by default NumPy's."""
        self._grammars = GrammarRows(max_num_seqs, vocab_size, grammars)
        self._row_sampler = row_sampler or NumpyRowSampler(max_num_seqs, vocab_size)
        self._requests: dict[int, _Request] = {}
        self._num_tokens: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self._seeds = np.zeros(max_num_seqs, dtype=np.uint64)
        self._is_plain = np.ones(max_num_seqs, dtype=np.bool_)
        """Whether the request in each row of the batch has neither edits nor a grammar."""
        self._has_edits = np.zeros(max_num_seqs, dtype=np.bool_)
        self._edited_rows: set[int] = set()
        self._constrained: set[int] = set()
        """The rows of the batch with edits or a grammar. Most batches have none."""
        self._num_logprobs: dict[int, int] = {}
        """Maps rows of the batch to the number of most probable tokens to report."""
        self._parameters = np.zeros((NUM_ROW_VALUES, max_num_seqs), dtype=np.float64)
        num_copies = max(1, min(max_num_seqs, _COPIED_BYTES // (4 * vocab_size)))
        self._copies = np.empty((num_copies, vocab_size), dtype=np.float32)

    def add(
        self,
        batch_row: int,
        params: SamplingParams,
        token_ids: np.ndarray,
        num_prompt_tokens: int,
        *,
        num_placeholders: int = 0,
    ) -> None:
        """Adds a request, with its output so far, in a free row of the batch. The first
        `num_placeholders` tokens are placeholders for embeddings: they are counted as positions,
        and otherwise ignored.
        """
        if batch_row in self._requests:
            raise ValueError(f"row {batch_row} is taken")
        grammar = self._grammars.add(batch_row, params, token_ids[num_prompt_tokens:])
        edits = logit_edits(
            params, token_ids[num_placeholders:], num_prompt_tokens - num_placeholders, grammar
        )
        temperature = float(np.float32(params.temperature))
        self._requests[batch_row] = _Request(params, edits)
        self._num_tokens[batch_row] = len(token_ids)
        self._seeds[batch_row] = params.seed or 0
        self._parameters[:, batch_row] = temperature, *filter_values(params)
        self._is_plain[batch_row] = not edits and grammar is None
        self._has_edits[batch_row] = bool(edits)
        if edits:
            self._edited_rows.add(batch_row)
        if temperature == 0 and not edits and params.logprobs is None:
            # Greedy: if the best of all tokens conforms, it is also the best of the conforming
            # tokens.
            self._grammars.draw_first(batch_row)
        if not self._is_plain[batch_row]:
            self._constrained.add(batch_row)
        if params.logprobs is not None:
            self._num_logprobs[batch_row] = params.logprobs

    def remove(self, batch_row: int) -> None:
        if self._requests.pop(batch_row, None) is None:
            raise ValueError(f"row {batch_row} is free")
        self._grammars.remove(batch_row)
        self._constrained.discard(batch_row)
        self._edited_rows.discard(batch_row)
        self._num_logprobs.pop(batch_row, None)

    def constrained(self, batch_rows: np.ndarray) -> Int64Array:
        """Indexes of the requests with logit edits or a grammar, which no device samples."""
        if not self._constrained:
            return _NO_INDEXES
        return np.flatnonzero(~self._is_plain[batch_rows])

    def forced_tokens(self, batch_row: int) -> list[int]:
        """The tokens that a request's grammar forces, or empty without a grammar."""
        grammar = self._grammars.get(batch_row)
        return [] if grammar is None else grammar.forced_tokens()

    def num_logprobs(self, batch_rows: np.ndarray) -> dict[int, int]:
        """Maps indexes in `batch_rows` to the number of most probable tokens to report. Requests
        without log-probabilities are absent.
        """
        if not self._num_logprobs:
            return {}
        asked = ((row, self._num_logprobs.get(of)) for row, of in enumerate(batch_rows.tolist()))
        return {row: num_top for row, num_top in asked if num_top is not None}

    def sampling_metadata(self, batch_rows: np.ndarray) -> SamplingMetadata:
        """Returns the parameters with which a device samples the next token of each of these
        requests, which have no edits and no grammar. Counts this token as part of each request,
        although its id may not be known yet.
        """
        positions = self._num_tokens[batch_rows]
        states = random_states(self._seeds[batch_rows], positions, SAMPLING_STREAM)
        self._num_tokens[batch_rows] += 1
        return SamplingMetadata(self._parameters[:, batch_rows], states)

    def sample(
        self,
        logits: torch.Tensor,
        batch_rows: np.ndarray,
        at: Int64Array | None = None,
        drawn: Int64Array | None = None,
    ) -> SamplerOutput:
        """Samples one token for each row of the logits, float32 [n, V], or only for the rows `at`
        [R]. The i-th sampled row belongs to batch_rows[i]. `drawn` [R]: results of `draw_ahead` for
        these rows. Only rows with edits or a grammar are then drawn here.

        Appends the tokens to the requests. The logits are not changed. If NaN or infinity leaves no
        token to sample, the row is in `nan_rows`. If the grammar and other parameters leave no
        token, the row is in `refused_rows`. Such a row has no log-probabilities, and other rows are
        not affected.
        """
        on_host: Float32Array = logits.numpy(force=True)
        rows = np.arange(len(on_host)) if at is None else at
        token_ids = self._draw(on_host, rows, batch_rows, drawn)
        again = self._grammars.nonconforming(batch_rows, token_ids)
        if again:
            token_ids[again] = self._draw(on_host, rows[again], batch_rows[again], None)
        failed = [i for i in self._grammars.failed(batch_rows) if token_ids[i] != UNUSABLE]
        token_ids[failed] = REFUSED
        nan_rows, refused_rows = _zero_missing(token_ids)
        missing = {*nan_rows.tolist(), *refused_rows.tolist()}
        logprobs = {
            row: logprob_rows(
                self._reported(on_host, rows[row : row + 1], batch_rows[row]),
                token_ids[row : row + 1],
                num_top,
            )
            for row, num_top in self.num_logprobs(batch_rows).items()
            if row not in missing
        }
        self._append(batch_rows, token_ids, missing)
        return SamplerOutput(
            token_ids.astype(np.int32),
            logprobs,
            nan_rows,
            refused_rows,
            self._grammars.errors(batch_rows, refused_rows) if len(refused_rows) else {},
        )

    def draw_ahead(
        self, logits: torch.Tensor, batch_rows: np.ndarray, ahead: Int64Array
    ) -> Int64Array | None:
        """Draws a token for each row of the logits [n, V]. Row i belongs to batch_rows[i], and its
        token is `ahead[i]` positions after the request's next token. Appends no token to the
        requests. The result is UNUSABLE for requests with edits or a grammar, because their tokens
        depend on the tokens before. Returns None if drawing ahead saves no time.
        """
        plain = np.flatnonzero(self._is_plain[batch_rows])
        if not (self._row_sampler.draws_ahead and len(plain)):
            return None
        token_ids = np.full(len(ahead), UNUSABLE)
        parameters = self._row_parameters(batch_rows[plain], ahead[plain])
        token_ids[plain] = self._row_sampler.sample(logits.numpy(force=True), plain, parameters)
        return token_ids

    def _reported(self, logits: Float32Array, row: Int64Array, batch_row: int) -> Float32Array:
        if self._grammars.get(batch_row) is None:
            return logits[row]
        copies = self._copies[:1]
        self._row_sampler.copy(logits, row, self._grammars.masks(np.array([batch_row])), copies)
        return copies

    def _draw(
        self,
        logits: Float32Array,
        rows: Int64Array,
        batch_rows: np.ndarray,
        drawn: Int64Array | None,
    ) -> Int64Array:
        """Draws a token for each of these rows of the logits. The result is UNUSABLE if NaN or
        infinity leaves no token to sample, and REFUSED if a grammar and other parameters leave
        none.
        """
        parameters = self._row_parameters(batch_rows)
        if drawn is None and not self._constrained:
            return self._row_sampler.sample(logits, rows, parameters)
        masks = self._grammars.masks(batch_rows)
        if drawn is None and not self._edited_rows:
            return self._row_sampler.sample(logits, rows, parameters, masks)
        has_edits = self._has_edits[batch_rows]
        unedited = ~has_edits if drawn is None else ~(has_edits | self._is_plain[batch_rows])
        token_ids = np.empty(len(rows), np.int64) if drawn is None else drawn.copy()
        some = unedited.nonzero()[0]
        if len(some):
            token_ids[some] = self._row_sampler.sample(
                logits, rows[some], parameters.of(some), None if masks is None else masks.of(some)
            )
        edited = has_edits.nonzero()[0]
        for start in range(0, len(edited), len(self._copies)):
            some = edited[start : start + len(self._copies)]
            copies, usable = self._edited(logits, rows[some], batch_rows[some])
            found = self._row_sampler.sample(copies, np.arange(len(some)), parameters.of(some))
            found[(found == UNUSABLE) & self._grammars.have_masks(batch_rows[some])] = REFUSED
            found[~usable] = UNUSABLE
            token_ids[some] = found
        return token_ids

    def _edited(
        self, logits: Float32Array, rows: Int64Array, batch_rows: np.ndarray
    ) -> tuple[Float32Array, BoolArray]:
        """Returns copies of these rows with their requests' edits applied, and whether each row had
        a token to sample before the edits.
        """
        copies = self._copies[: len(rows)]
        usable = self._row_sampler.copy(logits, rows, self._grammars.masks(batch_rows), copies)
        with np.errstate(all="ignore"):
            for copy, row in zip(copies, batch_rows.tolist(), strict=True):
                for edit in self._requests[row].edits:
                    edit.apply(copy)
        return copies, usable

    def _row_parameters(
        self, batch_rows: np.ndarray, ahead: Int64Array | None = None
    ) -> RowParameters:
        values, positions = self._parameters.take(batch_rows, axis=1), self._num_tokens[batch_rows]
        if ahead is not None:
            positions += ahead
        return RowParameters(values, self._seeds[batch_rows], positions)

    def _append(
        self, batch_rows: np.ndarray, token_ids: Int64Array, missing: AbstractSet[int]
    ) -> None:
        """Appends the sampled tokens to the requests. `missing` has the indexes of requests for
        which no token was sampled. These requests end, so their state is not updated.
        """
        self._num_tokens[batch_rows] += 1
        if not self._constrained:
            return
        tokens = zip(batch_rows.tolist(), token_ids.tolist(), strict=True)
        for index, (row, token_id) in enumerate(tokens):
            if row not in self._constrained or index in missing:
                continue
            self._grammars.append(row, token_id)
            for edit in self._requests[row].edits:
                edit.append(token_id)


def _zero_missing(token_ids: Int64Array) -> tuple[Int32Array, Int32Array]:
    missing = (token_ids < 0).nonzero()[0]
    if not len(missing):
        return _NO_ROWS, _NO_ROWS
    why, rows = token_ids[missing], missing.astype(np.int32)
    token_ids[missing] = 0
    return rows[why == UNUSABLE], rows[why == REFUSED]
