"""Fits serving costs, the time that services add to each step, to the answers of a real run."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, takewhile

import numpy as np

from benchmarks.accuracy.real import Answered
from services.cli.profile.fit import curve_factors, least_squares
from services.worker.backends.arrays import Int64Array
from services.worker.core.step_times import ServingCosts, StepTimes


@dataclass(frozen=True, slots=True)
class Decoding:
    """The time from the first to the last token of an answer, and the steps in that time."""

    seconds: float
    device_seconds: float
    """The sum of the profile's times for these steps."""
    num_steps: Int64Array
    """The number of these steps that computed 0, 1, 2, ... requests."""
    num_new_requests: int

    def expected(self, serving: ServingCosts) -> float:
        """The time from the first to the last token by the profile and the serving costs."""
        steps = sum(
            int(number) * serving.of_step(num_requests)
            for num_requests, number in enumerate(self.num_steps)
        )
        new_requests = serving.seconds_per_new_request * self.num_new_requests
        return self.device_seconds + steps + new_requests


def decodings(
    lines: Iterable[str], answered: Sequence[Answered], times: StepTimes
) -> list[Decoding]:
    """A Decoding for each answer whose tokens were computed in at least two steps and did not all
    arrive at the same time. `lines` are the lines of the scheduler's step log.
    """
    keys: dict[tuple[int, ...], int] = {}
    order, sizes, sums = dict[int, int](), [0], [np.zeros(2)]
    first, last, plans = dict[int, int](), dict[int, int](), dict[int, list[int]]()
    for line in lines:
        entry = json.loads(line)
        match entry.get("call"):
            case "add":
                keys[tuple(entry["tokens"])] = entry["key"]
            case "schedule" if entry["keys"]:
                order[entry["step"]] = len(sums)
                plans[entry["step"]] = entry["keys"]
                sizes.append(len(entry["keys"]))
                step = _seconds(entry, times), len(entry["new"])
                sums.append(sums[-1] + np.array(step))
            case "update_from_output" if entry["step"] in plans:
                place = order[entry["step"]]
                for key, tokens in zip(plans.pop(entry["step"]), entry["token_ids"], strict=True):
                    if tokens:
                        first.setdefault(key, place)
                        last[key] = place
    found = []
    for answer in answered:
        key = keys[answer.prompt]
        if last[key] > first[key] and answer.last > answer.first:
            seconds, num_new = (sums[last[key]] - sums[first[key]]).tolist()
            num_steps = np.bincount(sizes[first[key] + 1 : last[key] + 1])
            found.append(Decoding(answer.last - answer.first, seconds, num_steps, int(num_new)))
    return found


def _seconds(schedule: dict[str, list[int]], times: StepTimes) -> float:
    counts = np.array(schedule["num_scheduled_tokens"], np.int32)
    return times.seconds(counts, np.array(schedule["num_computed_tokens"], np.int32))


def fit_serving(found: Sequence[Decoding]) -> ServingCosts:
    """The costs with the smallest sum of squared errors, each divided by the measured time. With
    these weights the sum of all errors is nearly 0. The curve of requests has its points at powers
    of two and at the largest number.
    """
    most = max(len(one.num_steps) for one in found) - 1
    places = [*takewhile(lambda place: place < most, (2**power for power in count())), most]
    factors = np.array([curve_factors(places, size) for size in range(most + 1)])
    rows = np.array(
        [[*one.num_steps @ factors[: len(one.num_steps)], one.num_new_requests] for one in found]
    )
    seconds = np.array([one.seconds for one in found])
    missing = seconds - np.array([one.device_seconds for one in found])
    weights = np.sqrt(seconds)
    *curve, per_new = least_squares(rows / weights[:, None], missing / weights).tolist()
    return ServingCosts(
        seconds_by_requests=tuple(zip(places, curve, strict=True)), seconds_per_new_request=per_new
    )


def median_error(found: Sequence[Decoding], serving: ServingCosts) -> float:
    """The median of the absolute relative errors of the expected times."""
    return float(np.median([abs(one.expected(serving) / one.seconds - 1) for one in found]))


def total_error(found: Sequence[Decoding], serving: ServingCosts) -> float:
    expected = sum(one.expected(serving) for one in found)
    return expected / sum(one.seconds for one in found) - 1
