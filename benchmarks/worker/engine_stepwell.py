"""Runs Stepwell's runner, scheduler and pool in one process, under benchmarks.worker.loads."""

import asyncio
import time

import uvloop

from benchmarks.common.in_process import InProcess
from benchmarks.worker.loads import Prompts, Times, parse_arguments, serve
from services.common.process.settings import parse_settings
from services.worker.settings import WorkerSettings

NUM_BLOCKS = 1024


async def main() -> None:
    arguments = parse_arguments()
    flags = ["--model", str(arguments.model), "--num-threads", str(arguments.threads)]
    flags += ["--num-blocks", str(NUM_BLOCKS)]
    async with InProcess(parse_settings(WorkerSettings, "worker", flags, {})) as composed:
        loop = asyncio.get_running_loop()

        async def finish(prompt: list[int], num_tokens: int) -> list[float]:
            times: list[float] = []

            def arrived(count: int) -> None:
                times.extend([time.perf_counter()] * count)

            await composed.client.generate(prompt, num_tokens, arrived)
            return times

        async def finish_all(prompts: Prompts, num_tokens: int) -> Times:
            return await asyncio.gather(*(finish(prompt, num_tokens) for prompt in prompts))

        def generate(prompts: Prompts, num_tokens: int) -> Times:
            return asyncio.run_coroutine_threadsafe(finish_all(prompts, num_tokens), loop).result()

        await asyncio.to_thread(serve, generate, arguments, "Stepwell")


if __name__ == "__main__":
    uvloop.run(main())
