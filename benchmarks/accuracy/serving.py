"""Fits serving costs, the time that services add to each step, to the answers of a real run."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.accuracy.real import Answered
from services.cli.profile.fit import least_squares
from services.worker.backends.arrays import Float64Array
from services.worker.core.step_times import ServingCosts, StepTimes


@dataclass(frozen=True, slots=True)
class Decoding:
    """The time from the first to the last token of an answer, and the steps in that time."""

    seconds: float
    device_seconds: float
    """The sum of the profile's times for these steps."""
    num_steps: int
    num_tokens: int
    """The number of computed requests, summed over the steps of the answer."""
    num_new_requests: int

    def expected(self, serving: ServingCosts) -> float:
        """The time from the first to the last token by the profile and the serving costs."""
        return (
            self.device_seconds
            + serving.seconds * self.num_steps
            + serving.seconds_per_token * self.num_tokens
            + serving.seconds_per_new_request * self.num_new_requests
        )


def decodings(
    lines: Iterable[str], answered: Sequence[Answered], times: StepTimes
) -> list[Decoding]:
    """A Decoding for each answer whose tokens arrived in at least two steps. `lines` are the lines
    of the scheduler's step log.
    """
    keys: dict[tuple[int, ...], int] = {}
    sums, order = [np.zeros(4)], dict[int, int]()
    first, last, plans = dict[int, int](), dict[int, int](), dict[int, list[int]]()
    for line in lines:
        entry = json.loads(line)
        match entry.get("call"):
            case "add":
                keys[tuple(entry["tokens"])] = entry["key"]
            case "schedule" if entry["keys"]:
                order[entry["step"]] = len(sums)
                plans[entry["step"]] = entry["keys"]
                sums.append(sums[-1] + _features(entry, times))
            case "update_from_output" if entry["step"] in plans:
                place = order[entry["step"]]
                for key, tokens in zip(plans.pop(entry["step"]), entry["token_ids"], strict=True):
                    if tokens:
                        first.setdefault(key, place)
                        last[key] = place
    found = []
    for answer in answered:
        key = keys[answer.prompt]
        if last[key] > first[key]:
            seconds, *numbers = (sums[last[key]] - sums[first[key]]).tolist()
            found.append(Decoding(answer.last - answer.first, seconds, *map(int, numbers)))
    return found


def _features(schedule: dict[str, list[int]], times: StepTimes) -> Float64Array:
    counts = np.array(schedule["num_scheduled_tokens"], np.int32)
    computed = np.array(schedule["num_computed_tokens"], np.int32)
    return np.array([times.seconds(counts, computed), 1, len(counts), len(schedule["new"])])


def fit_serving(found: Sequence[Decoding]) -> ServingCosts:
    """The costs with the smallest sum of squared errors, each divided by the measured time. With
    these weights the sum of all errors is nearly 0.
    """
    rows = np.array([[one.num_steps, one.num_tokens, one.num_new_requests] for one in found])
    seconds = np.array([one.seconds for one in found])
    missing = seconds - np.array([one.device_seconds for one in found])
    weights = np.sqrt(seconds)
    each, per_token, per_new = least_squares(rows / weights[:, None], missing / weights).tolist()
    return ServingCosts(seconds=each, seconds_per_token=per_token, seconds_per_new_request=per_new)


def median_error(found: Sequence[Decoding], serving: ServingCosts) -> float:
    """The median of the absolute relative errors of the expected times."""
    return float(np.median([abs(one.expected(serving) / one.seconds - 1) for one in found]))


def total_error(found: Sequence[Decoding], serving: ServingCosts) -> float:
    expected = sum(one.expected(serving) for one in found)
    return expected / sum(one.seconds for one in found) - 1
