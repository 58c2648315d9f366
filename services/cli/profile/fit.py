"""Fits step times by least squares, and computes the errors of the fit."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.worker.backends.arrays import Float64Array, Int32Array
from services.worker.core.step_times import StepCosts, StepTimes, curve_value, num_contexts

_HELD_OUT = 5
"""One of this many measurements is left out of the fit, and shows the fit's error."""
_SIZES = tuple(size for power in range(20) for size in (2**power, 3 * 2**power // 2) if size)
"""Numbers of tokens at which the curve of step times may have a point."""
_LEAST_STEPS = 10
"""The minimum number of measurements between two points of the curve."""
_REQUESTS = 2
"""The index of the number of requests in the result of `_features`."""
_ROUNDING = 1e-10


@dataclass(frozen=True, slots=True)
class Measurement:
    """The scheduled and computed tokens of a step's requests, and the step's time."""

    num_scheduled_tokens: Int32Array
    num_computed_tokens: Int32Array
    seconds: float

    @property
    def num_tokens(self) -> int:
        return int(self.num_scheduled_tokens.sum())

    @property
    def is_decode(self) -> bool:
        """Whether every request has a single scheduled token."""
        return bool((self.num_scheduled_tokens == 1).all())


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of predicted step times."""

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
    """Fits the times of decode steps and of steps with chunks of prompts (mixed steps). Each kind
    needs at least ten measurements.
    """
    fitted = [one for index, one in enumerate(measured) if index % _HELD_OUT]
    others = [one for index, one in enumerate(measured) if not index % _HELD_OUT]
    times = StepTimes(
        _fit([one for one in fitted if one.is_decode]),
        _fit([one for one in fitted if not one.is_decode]),
    )
    return Fit(
        times,
        _errors(times, [one for one in others if one.is_decode]),
        _errors(times, [one for one in others if not one.is_decode]),
    )


def _fit(measured: Sequence[Measurement]) -> StepCosts:
    seconds = np.array([one.seconds for one in measured])
    places = _places([one.num_tokens for one in measured])
    rows = np.array([_features(one, places) for one in measured])
    # A decode step has as many requests as tokens, so the curve of tokens includes their cost.
    if all(one.is_decode for one in measured):
        rows[:, _REQUESTS] = 0
    found = least_squares(rows / seconds[:, None], np.ones(len(seconds))).tolist()
    chunks, single, each, *curve = found
    return StepCosts(
        seconds_per_new_context=chunks,
        seconds_per_decoded_context=single,
        seconds_per_request=each,
        seconds_by_tokens=tuple(zip(places, curve, strict=True)),
    )


def _places(numbers: Sequence[int]) -> list[int]:
    """The numbers of tokens at which the curve has points: the smallest and the largest of
    `numbers` (the tokens of the measured steps), and some of `_SIZES` between them.
    """
    ordered = np.sort(numbers)
    places, last = [int(ordered[0])], int(ordered[-1])
    for size in _SIZES:
        num_below = np.searchsorted(ordered, (places[-1], size), "right")
        if np.diff([*num_below, len(ordered)]).min() >= _LEAST_STEPS:
            places.append(size)
    return places if places[-1] == last else [*places, last]


def _features(measured: Measurement, places: Sequence[int]) -> list[float]:
    """The row of one measurement in the least-squares problem: one factor for each coefficient of
    StepCosts. The sum of the products of coefficient and factor is the predicted step time.
    """
    one = measured
    contexts = num_contexts(one.num_scheduled_tokens, one.num_computed_tokens)
    return [*contexts, len(one.num_scheduled_tokens), *curve_factors(places, one.num_tokens)]


def curve_factors(places: Sequence[int], place: int) -> list[float]:
    """For each point of a curve at `places`, the factor of its value in the curve's value at
    `place`.
    """
    units = np.eye(len(places)).tolist()
    return [curve_value(tuple(zip(places, unit, strict=True)), place) for unit in units]


def least_squares(rows: Float64Array, targets: Float64Array) -> Float64Array:
    """The non-negative coefficients x that minimize |rows x - targets|, by the algorithm of Lawson
    and Hanson ("Solving Least Squares Problems", 1974).
    """
    scales = np.linalg.norm(rows, axis=0)
    scales[scales == 0] = 1
    scaled = rows / scales
    found, positive = np.zeros(len(scales)), np.zeros(len(scales), bool)
    for _ in range(3 * len(scales)):
        gains = np.where(positive, -np.inf, scaled.T @ (targets - scaled @ found))
        if gains.max() <= _ROUNDING:
            break
        positive[gains.argmax()] = True
        while True:
            free = np.zeros(len(scales))
            free[positive] = np.linalg.lstsq(scaled[:, positive], targets)[0]
            wrong = positive & (free <= 0)
            if not wrong.any():
                found = free
                break
            step = (found[wrong] / (found[wrong] - free[wrong])).min()
            found += step * (free - found)
            positive &= found > _ROUNDING
            found[~positive] = 0
    unscaled: Float64Array = found / scales
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
