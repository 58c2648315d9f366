"""Our worker under the loads of benchmarks.worker_loads: runner, scheduler and pool in process."""

import argparse
import asyncio
import json
from pathlib import Path

import uvloop

from benchmarks.in_process import InProcess
from benchmarks.worker_loads import Prompts, answer
from services.common.settings import parse_settings
from services.worker.settings import WorkerSettings

NUM_BLOCKS = 1024


async def main() -> None:
    """Measures everything once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parsed, flags = parser.parse_known_args()
    flags += ["--model", parsed.model, "--num-threads", str(parsed.threads)]
    flags += ["--num-blocks", str(NUM_BLOCKS)]
    settings = parse_settings(WorkerSettings, "worker", flags, {})
    vocab_size = json.loads((Path(parsed.model) / "config.json").read_text())["vocab_size"]
    async with InProcess(settings) as composed:
        loop = asyncio.get_running_loop()

        async def finish(prompt: list[int], num_tokens: int) -> None:
            async for _ in composed.client.generate(prompt, num_tokens):
                pass

        async def finish_all(prompts: Prompts, num_tokens: int) -> None:
            await asyncio.gather(*(finish(prompt, num_tokens) for prompt in prompts))

        def generate(prompts: Prompts, num_tokens: int) -> None:
            asyncio.run_coroutine_threadsafe(finish_all(prompts, num_tokens), loop).result()

        await asyncio.to_thread(answer, generate, vocab_size, parsed.rounds)


if __name__ == "__main__":
    uvloop.run(main())
