"""Profiles of simulated devices: TOML files from which the times of steps and the memory follow.

A measured profile has coefficients of step times, fitted to the steps of a real worker with one
model. A computed profile has the bandwidth, the speed and the memory of a device, from which the
coefficients are computed for the size of the served model.
"""

import tomllib
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from services.common.process.settings import SettingError
from services.worker.core.batch.input_batch import BatchLimits
from services.worker.core.kv.free_memory import FreeMemory
from services.worker.core.step_times import NO_SERVING, ServingCosts, StepCosts, StepTimes

T = TypeVar("T")

DRAFT_ACCEPTANCE_RATE = 0.7
_DEFAULT_UTILIZATION = 0.9
_ANSWERS = ("mean_output_tokens", "draft_acceptance_rate")
"""Keys that every profile may have. They describe the outputs of the simulated model."""
_CURVE, _SERVING_CURVE = "seconds_by_tokens", "seconds_by_requests"
_LOADED = "seconds_per_loaded_token"
_TOO_MUCH = 1e18
_PROFILES = files("services.worker.profiles")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a model, or of one rank's part of it, from which step times are computed."""

    weight_bytes: int
    """Bytes of all weights."""
    read_bytes: int
    """Bytes of weights that a step reads: all weights except rows of the embedding."""
    products_per_token: int
    """Weights with which a token is multiplied. Of all experts, only the token's are counted."""
    attention_width: int
    """Elements of a token's queries: heads times head size, summed over all layers."""
    kv_bytes_per_token: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    itemsize: int
    """Bytes of one element of the model's data type."""


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    times: StepTimes
    kv_cache_memory_bytes: int
    mean_output_tokens: int = 0
    """The mean length of outputs. 0 means that outputs end only at their limits."""
    draft_acceptance_rate: float = DRAFT_ACCEPTANCE_RATE
    """The probability that a draft is accepted if all drafts before it were accepted."""
    draft: StepCosts | None = None
    """Coefficients of the time of a run of the draft model. None if the profile has none."""
    serving: ServingCosts = NO_SERVING
    """Time that the other services add to steps, for simulations that do not run them."""
    seconds_per_loaded_token: float = 0.0
    """The time to copy a token's keys and values from the tier of host memory to the KV cache. 0
    means unknown. Only `stepwell simulate` uses it.
    """

    def step_times(self, size: ModelSize) -> StepTimes:
        """Returns the step times of the measured model. `size` is ignored."""
        return self.times

    def draft_times(self, size: ModelSize) -> StepTimes:
        """Returns the times of the draft model's runs. Raises SettingError if there are none."""
        if self.draft is None:
            raise SettingError("--profile: no table [draft] has the times of a draft model")
        return StepTimes(self.draft, self.draft)

    def free_memory(
        self, size: ModelSize, limits: BatchLimits, utilization: float | None
    ) -> FreeMemory:
        """Returns the memory for the KV cache. `utilization` is a fraction, by default 1."""
        share = utilization or 1.0
        return FreeMemory(self.kv_cache_memory_bytes, share, 0, of_what="in the profile")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedProfile:
    """A device, described by the numbers of its data sheet.

    A step takes the sum of three times. It reads all weights once, and for each decoding request
    the keys and values of the request's context, at `bandwidth_efficiency` of the bandwidth. The
    step computes two operations for each weight and token, at `compute_efficiency` of the speed.
    For requests with several tokens it also computes four operations for each element of a query
    and each token of the query's context.
    """

    memory_bytes: int
    bandwidth_bytes_per_second: float
    operations_per_second: float
    """The speed of matrix products. A multiplication and an addition are two operations."""
    bandwidth_efficiency: float
    compute_efficiency: float
    seconds_per_step: float
    """Time of a step for everything else, such as kernel launches and sampling."""
    mean_output_tokens: int = 0
    draft_acceptance_rate: float = DRAFT_ACCEPTANCE_RATE

    def step_times(self, size: ModelSize) -> StepTimes:
        bandwidth = self.bandwidth_bytes_per_second * self.bandwidth_efficiency
        speed = self.operations_per_second * self.compute_efficiency
        costs = StepCosts(
            seconds=self.seconds_per_step + size.read_bytes / bandwidth,
            seconds_per_token=2 * size.products_per_token / speed,
            seconds_per_new_context=4 * size.attention_width / speed,
            seconds_per_decoded_context=size.kv_bytes_per_token / bandwidth,
        )
        return StepTimes(costs, costs)

    def draft_times(self, size: ModelSize) -> StepTimes:
        return self.step_times(size)

    def free_memory(
        self, size: ModelSize, limits: BatchLimits, utilization: float | None
    ) -> FreeMemory:
        """Returns the device's memory, minus the weights and an estimate for the largest step."""
        width = 6 * size.hidden_size + 4 * size.intermediate_size
        activation_bytes = limits.max_num_batched_tokens * width * size.itemsize
        activation_bytes += limits.max_sampled_rows * 4 * 4 * size.vocab_size
        share = utilization or _DEFAULT_UTILIZATION
        return FreeMemory(
            self.memory_bytes, share, activation_bytes, size.weight_bytes, "of the profile"
        )


Profile = MeasuredProfile | ComputedProfile


def profile_names() -> list[str]:
    """The names of the profiles that are part of Stepwell."""
    paths = (Path(entry.name) for entry in _PROFILES.iterdir())
    return sorted(path.stem for path in paths if path.suffix == ".toml")


def read_profile(name: str | None) -> Profile:
    """Reads the profile of this name, or a TOML file. Raises SettingError if missing or invalid."""
    if name is None:
        raise SettingError(f"--device simulated needs --profile with a TOML file or {_listed()}")
    if name in profile_names():
        text = (_PROFILES / f"{name}.toml").read_text(encoding="utf-8")
    else:
        try:
            text = Path(name).expanduser().read_text(encoding="utf-8")
        except FileNotFoundError:
            raise SettingError(f"--profile {name} is neither a file nor {_listed()}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(f"--profile {name}: the file cannot be read: {error}") from error
    try:
        return _parse(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, ValueError) as error:
        raise SettingError(f"--profile {name}: {error}") from error


def _listed() -> str:
    return f"one of {', '.join(profile_names())}"


def _parse(table: dict[str, Any]) -> Profile:
    table.pop("about", None)
    answers = _numbers({key: table.pop(key) for key in _ANSWERS if key in table}, "")
    if answers.get("draft_acceptance_rate", 0) > 1:
        raise ValueError("must have a draft_acceptance_rate of at most 1")
    if "hardware" in table:
        hardware = _pop_table(table, "hardware")
        _refuse_others(table)
        return _read(ComputedProfile, hardware | answers, "hardware")
    mixed = _step_costs(table, "mixed")
    decode = _step_costs(table, "decode") if "decode" in table else mixed
    draft = _step_costs(table, "draft") if "draft" in table else None
    serving = NO_SERVING
    if "serving" in table:
        own = _pop_table(table, "serving")
        curve = _pop_curve(own, "serving", _SERVING_CURVE)
        serving = replace(_read(ServingCosts, own, "serving"), seconds_by_requests=curve)
    others = {"kv_cache_memory_bytes": table.pop("kv_cache_memory_bytes", None)}
    if _LOADED in table:
        others[_LOADED] = table.pop(_LOADED)
    _refuse_others(table)
    numbers = _numbers(others, "") | answers
    return MeasuredProfile(StepTimes(decode, mixed), draft=draft, serving=serving, **numbers)


def _step_costs(table: dict[str, Any], key: str) -> StepCosts:
    own = _pop_table(table, key)
    curve = _pop_curve(own, key, _CURVE)
    costs = _read(StepCosts, own, key)
    if not own and not curve:
        raise ValueError(f"must have {key}.seconds or {key}.{_CURVE}")
    return replace(costs, seconds_by_tokens=curve)


def _pop_curve(table: dict[str, Any], key: str, name: str) -> tuple[tuple[int, float], ...]:
    points = table.pop(name, [])
    try:
        curve = tuple((int(place), float(seconds)) for place, seconds in points)
    except (TypeError, ValueError):
        curve = ((0, 0.0),)
    places = [0, *(place for place, _ in curve)]
    is_rising = all(one < other for one, other in pairwise(places))
    if not is_rising or not all(0 <= seconds < _TOO_MUCH for _, seconds in curve):
        raise ValueError(
            f"must have {key}.{name} as pairs of a number of {name.rpartition('_')[2]} and a time "
            "in seconds, with ascending numbers"
        )
    return curve


def _pop_table(table: dict[str, Any], key: str) -> dict[str, Any]:
    found = table.pop(key, None)
    if not isinstance(found, dict):
        raise ValueError(f"must have the table [{key}]")
    return found


def _refuse_others(table: dict[str, Any]) -> None:
    if table:
        raise ValueError(f"has the unknown key {min(table)!r}")


def _read(cls: type[T], table: dict[str, Any], where: str) -> T:
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(table.keys() - known):
        raise ValueError(
            f"has the unknown key {where}.{unknown[0]}; known are {', '.join(sorted(known))}"
        )
    try:
        return cls(**_numbers(table, f"{where}."))
    except TypeError as error:
        raise ValueError(f"[{where}] {str(error).partition('__init__() ')[2]}") from None


def _numbers(table: dict[str, Any], prefix: str) -> dict[str, Any]:
    for key, value in table.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < _TOO_MUCH:
            raise ValueError(f"must have {prefix}{key} as a number of at least 0, not {value!r}")
    return table
