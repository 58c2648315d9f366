"""Computes when tokens should arrive, from a scheduler's step log and a profile of a device."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from services.worker.core.step_times import StepTimes


@dataclass(slots=True)
class RequestTimes:
    """When a request's tokens should arrive, in seconds from its burst's first step."""

    tokens: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.tokens[0]

    @property
    def itls(self) -> list[float]:
        return np.diff(self.tokens).tolist()


def expected_times(lines: Iterable[str], times: StepTimes) -> list[RequestTimes]:
    """The expected times of all requests of a step log, if steps follow each other without gaps and
    each takes the profile's time. A burst begins with a request that arrives when no other request
    is present.
    """
    requests: dict[int, RequestTimes] = {}
    plans: dict[int, tuple[list[int], float]] = {}
    present: set[int] = set()
    now = 0.0
    for line in lines:
        entry = json.loads(line)
        match entry.get("call"):
            case "add":
                now = now if present else 0.0
                present.add(entry["key"])
                requests[entry["key"]] = RequestTimes()
            case "schedule" if entry["keys"]:
                counts = np.array(entry["num_scheduled_tokens"], np.int32)
                computed = np.array(entry["num_computed_tokens"], np.int32)
                now += times.seconds(counts, computed)
                plans[entry["step"]] = entry["keys"], now
            case "update_from_output" if entry["step"] in plans:
                keys, ended = plans.pop(entry["step"])
                for key, token_ids in zip(keys, entry["token_ids"], strict=True):
                    requests[key].tokens += [ended] * len(token_ids)
                present -= {key for key, *_ in entry["ended"]}
    return [request for request in requests.values() if request.tokens]
