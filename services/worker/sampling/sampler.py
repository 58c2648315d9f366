"""The sampler of the input batch: one row of logits in, one token out, per request."""

from dataclasses import dataclass

import numpy as np
import torch

from services.common.sampling import SamplingParams
from services.worker.sampling.arrays import (
    Float32Array,
    Float64Array,
    Int32Array,
    Int64Array,
    UInt64Array,
)
from services.worker.sampling.edits import LogitEdit, logit_edits
from services.worker.sampling.filters import keep_only, kept_token_ids
from services.worker.sampling.grammar import GrammarMask, Grammars
from services.worker.sampling.logprobs import LogprobRows, logprob_rows
from services.worker.sampling.philox import random_states
from services.worker.sampling.race import Race

_SAMPLING_STREAM = 0


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Tokens that one step samples, in the order of its rows."""

    token_ids: Int32Array  # [R]
    logprobs: dict[int, LogprobRows]  # by row, one row each, where the request wants them
    nan_rows: Int32Array  # rows without a usable distribution; their token is 0
    refused_rows: Int32Array  # rows whose grammar allows no token; their token is 0


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """What sampling needs of requests without logit edits, column i for row i of the logits.

    `parameters` [4, R]: temperatures, top_k (0: unused), top_p, min_p. `states` [R, 2]: the random
    states of the draws, see race.py.
    """

    parameters: Float64Array
    states: UInt64Array

    @property
    def temperatures(self) -> Float64Array:
        """0 for a greedy request."""
        temperatures: Float64Array = self.parameters[0]
        return temperatures

    def of(self, rows: slice) -> "SamplingMetadata":
        """That of some rows."""
        return SamplingMetadata(self.parameters[:, rows], self.states[rows])


@dataclass(frozen=True, slots=True)
class _Request:
    params: SamplingParams
    temperature: np.float32
    edits: tuple[LogitEdit, ...]
    grammar: GrammarMask | None


class Sampler:
    """Samples for the requests in the rows of a batch, and keeps the state that sampling needs.

    A row goes through these stages, in vLLM's order:

      1. log-probabilities, of the logits as the model gave them, or of those that the grammar of
         a request leaves;
      2. edits: the grammar, allowed tokens, bad words, min tokens, logit bias, penalties;
      3. temperature; 0 takes the best token, the lowest id among equals, and ends here;
      4. filters: min-p, top-k, top-p;
      5. the draw: a race of exponentials, each a function of the request's seed, the position of
         the token in its sequence and the token's id (race.py).

    The result of a row does not depend on other rows, bit for bit: a request samples the same
    tokens alone and in any batch, and after it was removed and added again with its output.

    Greedy rows take one pass over the batch. Other rows are computed one by one up to their
    filters, each with the edits and filters that it has. For a large vocabulary this takes as long
    as passes over the whole batch, and less memory. Races are run for several rows at a time.
    """

    def __init__(
        self, max_num_seqs: int, vocab_size: int, grammars: Grammars | None = None
    ) -> None:
        """`grammars`: needed by requests with `structured_outputs`."""
        self._vocab_size, self._grammars = vocab_size, grammars
        self._requests: dict[int, _Request] = {}
        self._row_numbers = np.arange(max_num_seqs)
        self._num_tokens: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self._seeds = np.zeros(max_num_seqs, dtype=np.uint64)
        self._is_plain = np.zeros(max_num_seqs, dtype=np.bool_)
        self._is_edited = np.zeros(max_num_seqs, dtype=np.bool_)
        self._wants_logprobs = np.zeros(max_num_seqs, dtype=np.bool_)
        self._parameters = np.zeros((4, max_num_seqs), dtype=np.float64)
        self._race = Race(max_num_seqs, vocab_size)
        self._weights = np.empty(vocab_size, dtype=np.float32)

    def add(
        self,
        batch_row: int,
        params: SamplingParams,
        token_ids: np.ndarray,
        num_prompt_tokens: int,
        *,
        num_placeholders: int = 0,
    ) -> None:
        """Puts a request, with the output that it has, into a free row of the batch.

        The first `num_placeholders` tokens only count as positions.
        """
        if batch_row in self._requests:
            raise ValueError(f"row {batch_row} is taken")
        grammar = self._grammar(params, token_ids[num_prompt_tokens:])
        edits = logit_edits(
            params, token_ids[num_placeholders:], num_prompt_tokens - num_placeholders, grammar
        )
        temperature = np.float32(params.temperature)
        self._requests[batch_row] = _Request(params, temperature, edits, grammar)
        self._num_tokens[batch_row] = len(token_ids)
        self._seeds[batch_row] = params.seed or 0
        self._parameters[:, batch_row] = temperature, params.top_k, params.top_p, params.min_p
        self._is_plain[batch_row] = temperature == 0 and not edits
        self._is_edited[batch_row] = bool(edits)
        self._wants_logprobs[batch_row] = params.logprobs is not None

    def remove(self, batch_row: int) -> None:
        """Frees a row of the batch."""
        if self._requests.pop(batch_row, None) is None:
            raise ValueError(f"row {batch_row} is free")

    def is_simple(self, batch_rows: np.ndarray) -> bool:
        """Whether these requests can be sampled by `sampling_metadata`: none has logit edits."""
        return not self._is_edited[batch_rows].any()

    def forced_tokens(self, batch_row: int) -> list[int]:
        """The tokens that a request's grammar leaves no choice about; none without a grammar."""
        grammar = self._requests[batch_row].grammar
        return [] if grammar is None else grammar.forced_tokens()

    def num_logprobs(self, batch_rows: np.ndarray) -> dict[int, int]:
        """By index in `batch_rows`, for requests that ask for log-probabilities: how many of the
        most probable tokens to report.
        """
        found: dict[int, int] = {}
        for row in self._wants_logprobs[batch_rows].nonzero()[0].tolist():
            num_top = self._requests[batch_rows[row]].params.logprobs
            assert num_top is not None
            found[row] = num_top
        return found

    def sampling_metadata(self, batch_rows: np.ndarray) -> SamplingMetadata:
        """What a device needs to sample the next token of simple requests.

        The token counts as part of the requests from then on; its id need not be known.
        """
        states = self._states(batch_rows)
        self._num_tokens[batch_rows] += 1
        return SamplingMetadata(self._parameters[:, batch_rows], states)

    def sample(self, logits: torch.Tensor, batch_rows: np.ndarray) -> SamplerOutput:
        """One token for each row of the logits float32 [R, V]; row i belongs to batch_rows[i].

        The tokens become part of the requests. The logits are not changed. A row is reported in
        `nan_rows`, and has no log-probabilities, if NaN or infinity leaves no token to sample, in
        `refused_rows` if its grammar and its other parameters do; this does not affect other rows.
        """
        on_host: Float32Array = logits.numpy(force=True)
        token_ids = on_host.argmax(axis=1)
        usable = np.isfinite(on_host[self._row_numbers[: len(on_host)], token_ids])
        refused = list[int]()
        plain = self._is_plain[batch_rows]
        if not plain.all():
            rows = np.flatnonzero(usable & ~plain)
            self._choose_some(on_host, batch_rows, rows, token_ids, usable)
            unusable = rows[~usable[rows]].tolist()
            refused = [row for row in unusable if self._requests[batch_rows[row]].grammar]
        token_ids[~usable] = 0
        logprobs = {
            row: logprob_rows(
                self._reported(on_host[row], batch_rows[row]), token_ids[row : row + 1], num_top
            )
            for row, num_top in self.num_logprobs(batch_rows).items()
            if usable[row]
        }
        self._append(batch_rows, token_ids)
        usable[refused] = True
        return SamplerOutput(
            token_ids=token_ids.astype(np.int32),
            logprobs=logprobs,
            nan_rows=np.flatnonzero(~usable).astype(np.int32),
            refused_rows=np.array(refused, np.int32),
        )

    def _grammar(self, params: SamplingParams, output: np.ndarray) -> GrammarMask | None:
        """What holds a request to its `structured_outputs`, after the output so far."""
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            raise ValueError("this sampler cannot constrain outputs")
        return GrammarMask(
            self._grammars, params.structured_outputs, output.tolist(), self._vocab_size
        )

    def _reported(self, logits: Float32Array, batch_row: int) -> Float32Array:
        """The logits [1, V] of which log-probabilities are reported."""
        grammar = self._requests[batch_row].grammar
        if grammar is not None:
            logits = logits.copy()
            grammar.apply(logits)
        return logits[None]

    def _choose_some(
        self,
        logits: Float32Array,
        batch_rows: np.ndarray,
        rows: np.ndarray,
        token_ids: Int64Array,
        usable: np.ndarray,
    ) -> None:
        """Writes the tokens of these rows of the logits, and whether there is one to sample."""
        race, drawing = self._race, list[int]()
        race.clear()
        states = self._states(batch_rows[rows])
        with np.errstate(all="ignore"):
            for row, own_states in zip(rows.tolist(), states, strict=True):
                request = self._requests[batch_rows[row]]
                own = race.next_row
                np.copyto(own, logits[row])
                for edit in request.edits:
                    edit.apply(own)
                best = token_ids[row] = own.argmax()
                largest = own[best]
                usable[row] = np.isfinite(largest)
                if request.temperature == 0 or not usable[row]:
                    continue
                self._filter(own, largest, request)
                race.enter(largest, request.temperature, own_states)
                drawing.append(row)
                if len(drawing) == race.capacity:
                    token_ids[drawing] = race.run()
                    drawing.clear()
            if drawing:
                token_ids[drawing] = race.run()

    def _filter(self, logits: Float32Array, largest: np.float32, request: _Request) -> None:
        """Bans, in place, the tokens of a row [V] that its filters do not keep."""
        if not request.params.filters:
            return
        weights = self._weights
        np.subtract(logits, largest, out=weights)
        np.divide(weights, request.temperature, out=weights)
        np.exp(weights, out=weights)
        kept = kept_token_ids(logits, weights, request.params)
        if kept is not None:
            keep_only(logits, kept)

    def _states(self, batch_rows: np.ndarray) -> UInt64Array:
        return random_states(
            self._seeds[batch_rows], self._num_tokens[batch_rows], _SAMPLING_STREAM
        )

    def _append(self, batch_rows: np.ndarray, token_ids: Int64Array) -> None:
        self._num_tokens[batch_rows] += 1
        for row in self._is_edited[batch_rows].nonzero()[0].tolist():
            for edit in self._requests[batch_rows[row]].edits:
                edit.append(int(token_ids[row]))
