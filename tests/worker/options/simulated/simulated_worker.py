"""Workers with a simulated device, which serve tiny models without weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.worker.backends.choices import DeviceSetting
from services.worker.build import build_worker
from services.worker.core.model_runner import ModelRunner
from services.worker.core.pipeline import StagedModel
from services.worker.core.worker import Worker
from services.worker.options.simulated.runner import TimedModel, TimedRunner
from services.worker.parallel.group import Group
from services.worker.settings import WorkerSettings
from tests.tiny_models import edit_config, save_tiny_model
from tests.worker.options.simulated.oracle import Oracle

PROFILE = """
about = "a device that takes no time"
kv_cache_memory_bytes = 4_000_000

[mixed]
seconds = 0

[draft]
seconds = 0
"""


@dataclass
class Clock:
    now: float = 0.0

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def save_profile(directory: Path, text: str = PROFILE) -> str:
    """Saves a simulated device's profile in a model's directory. Returns its path."""
    path = directory / "profile.toml"
    path.write_text(text)
    return str(path)


def save_configuration(directory: Path, kind: str = "llama") -> None:
    save_tiny_model(directory, kind)
    for weights in directory.glob("*.safetensors"):
        weights.unlink()


def save_draft(directory: Path) -> Path:
    draft = directory / "draft"
    save_configuration(draft)
    vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
    edit_config(draft, num_hidden_layers=1, vocab_size=vocab_size)
    return draft


def build(directory: Path, group: Group | None = None, **settings: Any) -> Worker:
    """A simulated worker of the model in a directory. Without a profile, steps take no time."""
    profile = settings.pop("profile", None) or save_profile(directory)
    wanted = WorkerSettings(
        model=directory, device=DeviceSetting.SIMULATED, profile=profile, **settings
    )
    return build_worker(wanted, "simulated", lambda: None, group)


def simulated(directory: Path, kind: str = "llama", **settings: Any) -> Worker:
    save_configuration(directory, kind)
    return build(directory, **settings)


def model_runner(worker: Worker) -> ModelRunner:
    assert isinstance(worker.runner, TimedRunner)
    assert isinstance(worker.runner.runner, ModelRunner)
    return worker.runner.runner


def timed_model(worker: Worker) -> TimedModel:
    """The worker's model. It records the simulated time of each run."""
    model = model_runner(worker).model
    model = model.model if isinstance(model, StagedModel) else model
    assert isinstance(model, TimedModel)
    return model


def oracle_of(worker: Worker) -> Oracle:
    own = worker.description
    return Oracle(own.vocab_size, own.eos_token_ids, worker.runner.limits.windows)
