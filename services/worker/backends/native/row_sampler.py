"""Draws tokens from rows of logits in the compiled library: see cpp/sampling.h."""

import ctypes

import numpy as np

from services.worker.backends.arrays import BoolArray, Float32Array, Int64Array
from services.worker.backends.native import library as native
from services.worker.backends.native.library import NativeLogitRows, NativeRowMasks, address
from services.worker.backends.row_sampler import RowMasks, RowParameters


class NativeRowSampler:
    """A RowSampler in C++: one call for all rows."""

    draws_ahead = True

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = native.SamplingFunctions(library)

    def sample(
        self,
        logits: Float32Array,
        rows: Int64Array,
        parameters: RowParameters,
        masks: RowMasks | None = None,
    ) -> Int64Array:
        num_values, num_known = len(parameters.values), self._functions.num_row_values
        if num_values != num_known:
            raise ValueError(f"a row has {num_values} values, but compiled code reads {num_known}")
        token_ids = np.empty(len(rows), np.int64)
        drawn = native.NativeRowParameters(
            *map(address, (parameters.values, parameters.seeds, parameters.positions))
        )
        self._functions.sample_rows(
            _logit_rows(logits, rows), _row_masks(masks), drawn, address(token_ids)
        )
        return token_ids

    def copy(
        self, logits: Float32Array, rows: Int64Array, masks: RowMasks | None, copies: Float32Array
    ) -> BoolArray:
        usable = np.empty(len(rows), np.bool_)
        self._functions.copy_rows(
            _logit_rows(logits, rows), _row_masks(masks), address(copies), address(usable)
        )
        return usable


def _logit_rows(logits: Float32Array, rows: Int64Array) -> NativeLogitRows:
    stride, size = logits.strides[0] // logits.itemsize, logits.shape[1]
    return NativeLogitRows(address(logits), stride, size, address(rows), len(rows))


def _row_masks(masks: RowMasks | None) -> NativeRowMasks:
    if masks is None:
        return NativeRowMasks(None, 0, None)
    return NativeRowMasks(address(masks.words), masks.words.shape[1], address(masks.rows))
