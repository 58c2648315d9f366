"""Draws tokens in NumPy, for workers without compiled kernels, which draw the same tokens."""

import numpy as np

from services.worker.backends.arrays import BoolArray, Float32Array, Int64Array
from services.worker.backends.row_sampler import REFUSED, UNUSABLE, RowMasks, RowParameters
from services.worker.sampling.filters import Filters, keep_only, kept_token_ids
from services.worker.sampling.philox import SAMPLING_STREAM, random_states
from services.worker.sampling.race import Race


class NumpyRowSampler:
    """A RowSampler in NumPy. It filters one row of logits at a time, and draws for several."""

    draws_ahead = False

    def __init__(self, max_num_rows: int, vocab_size: int) -> None:
        self._race = Race(max_num_rows, vocab_size)

    def sample(
        self,
        logits: Float32Array,
        rows: Int64Array,
        parameters: RowParameters,
        masks: RowMasks | None = None,
    ) -> Int64Array:
        token_ids = np.full(len(rows), UNUSABLE)
        race = self._race
        drawing: list[int] = []
        race.clear()
        temperatures = parameters.values[0].astype(np.float32)
        states = random_states(parameters.seeds, parameters.positions, SAMPLING_STREAM)
        with np.errstate(all="ignore"):
            for index, row in enumerate(rows.tolist()):
                of_row, allowed = logits[row], _allowed(masks, index, logits.shape[1])
                best, temperature = of_row.argmax(), temperatures[index]
                if not np.isfinite(of_row[best]):
                    continue
                if allowed is not None:
                    of_row = np.where(allowed, of_row, -np.inf)
                    best = of_row.argmax()
                largest = of_row[best]
                if not np.isfinite(largest):
                    token_ids[index] = REFUSED
                    continue
                token_ids[index] = best
                if temperature == 0:
                    continue
                filters = Filters.from_values(parameters.values[1:, index].tolist())
                np.copyto(race.next_row, of_row)
                kept = kept_token_ids(of_row, largest, temperature, filters)
                if kept is not None:
                    keep_only(race.next_row, kept)
                race.enter(largest, temperature, states[index])
                drawing.append(index)
                if len(drawing) == race.capacity:
                    token_ids[drawing] = race.run()
                    drawing.clear()
            if drawing:
                token_ids[drawing] = race.run()
        return token_ids

    def copy(
        self, logits: Float32Array, rows: Int64Array, masks: RowMasks | None, copies: Float32Array
    ) -> BoolArray:
        usable = np.empty(len(rows), np.bool_)
        for index, row in enumerate(rows.tolist()):
            copy, allowed = copies[index], _allowed(masks, index, logits.shape[1])
            np.copyto(copy, logits[row])
            usable[index] = np.isfinite(copy[copy.argmax()])
            if allowed is not None:
                np.copyto(copy, -np.inf, where=~allowed)
        return usable


def _allowed(masks: RowMasks | None, index: int, vocab_size: int) -> BoolArray | None:
    if masks is None or masks.rows[index] < 0:
        return None
    words = masks.words[masks.rows[index]]
    return np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
