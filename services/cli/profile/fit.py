"""Fits step times by least squares, and computes the errors of the fit."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import combinations

import numpy as np

from services.worker.core.step_times import StepCosts, StepTimes, step_features
from services.worker.sampling.arrays import Float64Array, Int32Array

_HELD_OUT = 5
"""One in five measurements is not fitted, and only used to compute errors."""
_SMALL = 8, 16, 20, 24, 28, 32, 48, 64, 96, 128
"""The sizes, in tokens, up to which steps may have costs of their own."""
_LEAST_GAIN = 0.2
"""The fraction of the squares of the errors that own costs of small steps must remove."""
_ROUNDING = 1e-12
_LEAST_STEPS = 10
_DECODE, _MIXED = (0, 3, 4, 5), (0, 1, 2, 3, 4, 5)
"""The fitted fields of StepCosts. In steps of single tokens there are as many tokens as requests,
and no chunks.
"""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The scheduled and computed tokens of a step's requests, and the step's time."""

    num_scheduled_tokens: Int32Array
    num_computed_tokens: Int32Array
    seconds: float

    @property
    def num_tokens(self) -> int:
        """The number of the step's tokens."""
        return int(self.num_scheduled_tokens.sum())

    @property
    def is_decode(self) -> bool:
        """Whether every request has a single token."""
        return bool((self.num_scheduled_tokens == 1).all())


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of the predicted times of steps."""

    num_steps: int
    median: float
    p90: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted times, and their errors for steps that were not fitted."""

    times: StepTimes
    decode: Errors
    mixed: Errors


def fit_times(measured: Sequence[Measurement]) -> Fit:
    """Fits all kinds of steps. Each kind needs at least ten measurements."""
    fitted = [one for index, one in enumerate(measured) if index % _HELD_OUT]
    others = [one for index, one in enumerate(measured) if not index % _HELD_OUT]
    times = _fit_kinds(fitted, None, 0)
    best, least = times, (1 - _LEAST_GAIN) * _squares(times, fitted) - _ROUNDING
    for size in _SMALL:
        small = [one for one in fitted if one.num_tokens <= size]
        large = [one for one in fitted if one.num_tokens > size]
        if len(small) < _LEAST_STEPS or sum(not one.is_decode for one in large) < _LEAST_STEPS:
            continue
        costs = _fit(small, _MIXED)
        times = _fit_kinds(large, costs, size)
        if (error := _squares(times, fitted)) < least:
            best, least = times, error
    times = best
    return Fit(
        times,
        _errors(times, [one for one in others if one.is_decode]),
        _errors(times, [one for one in others if not one.is_decode]),
    )


def _fit_kinds(
    measured: Sequence[Measurement], small: StepCosts | None, small_tokens: int
) -> StepTimes:
    """The times of steps, of which all small ones have given costs. Without large decode steps the
    costs of decode steps are those of small steps.
    """
    decodes = [one for one in measured if one.is_decode]
    decode = small
    if small is None or len(decodes) >= _LEAST_STEPS:
        decode = _fit(decodes, _DECODE)
    assert decode is not None
    mixed = _fit([one for one in measured if not one.is_decode], _MIXED)
    return StepTimes(decode, mixed, small, small_tokens)


def _squares(times: StepTimes, measured: Sequence[Measurement]) -> float:
    """The sum of the squares of the relative errors."""
    return float((_relative_errors(times, measured) ** 2).sum())


def _fit(measured: Sequence[Measurement], columns: tuple[int, ...]) -> StepCosts:
    """The costs that minimize the squares of the relative errors."""
    seconds = np.array([one.seconds for one in measured])
    features = np.array(
        [step_features(one.num_scheduled_tokens, one.num_computed_tokens) for one in measured]
    )
    found = least_squares(features / seconds[:, None], np.ones(len(seconds)), columns)
    names = (field.name for field in fields(StepCosts))
    return StepCosts(**dict(zip(names, found.tolist(), strict=True)))


def least_squares(
    rows: Float64Array, targets: Float64Array, columns: Sequence[int]
) -> Float64Array:
    """The coefficients of 0 or more whose products with the rows are closest to the targets.
    Coefficients of other columns than `columns` are 0.

    The solution is the best one of all subsets of coefficients whose unconstrained solution is not
    negative. There are at most 64 subsets.
    """
    scales = rows.max(axis=0)
    scales[scales == 0] = 1
    scaled = rows / scales
    best, least = np.zeros(len(scales)), np.inf
    for count in range(len(columns) + 1):
        for subset in map(list, combinations(columns, count)):
            found = np.linalg.lstsq(scaled[:, subset], targets)[0]
            error = float(((scaled[:, subset] @ found - targets) ** 2).sum())
            if error < least and (found >= 0).all():
                best, least = np.zeros(len(scales)), error
                best[subset] = found
    unscaled: Float64Array = best / scales
    return unscaled


def _errors(times: StepTimes, measured: Sequence[Measurement]) -> Errors:
    errors = abs(_relative_errors(times, measured))
    return Errors(len(errors), float(np.median(errors)), float(np.quantile(errors, 0.9)))


def _relative_errors(times: StepTimes, measured: Sequence[Measurement]) -> Float64Array:
    return np.array(
        [
            times.seconds(one.num_scheduled_tokens, one.num_computed_tokens) / one.seconds - 1
            for one in measured
        ]
    )
