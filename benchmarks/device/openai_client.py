"""Sends a burst of requests with the package openai, in a Python interpreter that has this package.

    python openai_client.py URL '{"num_requests": 32, "input_len": 2000, ...}'

The program prints the times to the first token and between tokens as JSON, in milliseconds.
"""

import asyncio
import json
import random
import sys
import time
from itertools import pairwise
from typing import Any


async def main(url: str, burst: dict[str, int]) -> None:
    from openai import AsyncOpenAI  # noqa: PLC0415 - not a dependency

    client: Any = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    (model,) = (await client.models.list()).data
    draw = random.Random(burst["seed"])

    async def send(prompt: list[int]) -> list[float]:
        times = [time.perf_counter()]
        stream = await client.completions.create(
            model=model.id,
            prompt=prompt,
            max_tokens=burst["output_len"],
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].token_ids:
                times.append(time.perf_counter())
        return times

    prompts = [
        [draw.randrange(1000, 100_000) for _ in range(burst["input_len"])]
        for _ in range(burst["num_requests"])
    ]
    sent = await asyncio.gather(*map(send, prompts))
    gaps = [[1000 * (b - a) for a, b in pairwise(times)] for times in sent]
    print(
        json.dumps({"ttft": [own[0] for own in gaps], "itl": [g for own in gaps for g in own[1:]]})
    )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
