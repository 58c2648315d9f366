"""Complete step logs of small scenarios, recorded from a scheduler in this process."""

import asyncio
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepwell.common.v1 import common_pb2

from services.scheduler.adapters.replica import ReplicaShape
from services.scheduler.adapters.telemetry.step_log import header
from services.scheduler.core.step_log.log_entry import Entry
from services.scheduler.core.step_log.recorder import RecordingScheduler
from services.simulation.inprocess_pool import InProcessPool
from tests.scenarios.run import ScenarioRun
from tests.scenarios.scenario import read_scenario
from tests.scheduler.fake_worker import FakeWorker

BLOCK_SIZE = 4
SMALL_POOL = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 60,
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks": 17,
    "async_scheduling": True,
}


def crowded(num_requests: int = 10, **config: Any) -> dict[str, Any]:
    """A scenario with more requests than fit in the pool. Two of the requests are aborted."""
    events: list[dict[str, Any]] = [
        {
            "step": 2 * number,
            "add": {
                "request_id": f"r{number}",
                "prompt_token_ids": [7 * (number % 3) + offset for offset in range(9)]
                + [100 * number + offset for offset in range(number % 7)],
                "max_tokens": 10 + number % 4,
                "stop_token_ids": [5],
                "cache_salt": "é" if number == 3 else "",
            },
        }
        for number in range(num_requests)
    ]
    events.append({"step": 9, "abort": ["r2"], "phase": "mid"})
    events.append({"step": 14, "abort": "r5"})
    return {"name": "crowded", "config": {**SMALL_POOL, **config}, "events": events}


@dataclass(frozen=True, slots=True)
class RecordedLog:
    """The entries of a step log, one for each line of the log file."""

    entries: list[Entry]

    def text(self) -> str:
        return "".join(json.dumps(entry, separators=(",", ":")) + "\n" for entry in self.entries)

    def write(self, path: Path) -> Path:
        """Writes the log file and returns its path."""
        path.write_text(self.text())
        return path


def record(scenario: dict[str, Any], *more_groups: common_pb2.KVCacheGroup) -> RecordedLog:
    """Runs a scenario with a KV-cache group of full attention, and `more_groups`. Returns the log
    that a scheduler service would write.
    """
    story = read_scenario(scenario)
    description = FakeWorker(num_blocks=story.config.num_blocks).description
    description.groups.extend(more_groups)
    shape = ReplicaShape(description, story.config.num_blocks)
    config = replace(story.config, groups=shape.groups)
    pool = InProcessPool(config)
    entries = [header(config, shape, 0)]
    scheduler = RecordingScheduler(config, pool, entries.append)
    asyncio.run(ScenarioRun(story, scheduler, pool.core).run())
    return RecordedLog([*entries, {"call": "end"}])
