"""A client that streams a completion, and the tokens that it should receive."""

import asyncio
import json

from tests.gateway.fake_scheduler import formula
from tests.gateway.serving import Serving

PROMPT = [5, 6, 7]
BODY = {"prompt": PROMPT, "seed": 11, "max_tokens": 30, "stream": True, "return_token_ids": True}


class Stream:
    def __init__(
        self, served: Serving, body: dict | None = None, headers: dict | None = None
    ) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.error: dict | None = None
        self.task = asyncio.create_task(self._read(served, BODY | (body or {}), headers))

    async def _read(self, served: Serving, body: dict, headers: dict | None) -> None:
        async with served.http.stream(
            "POST", "/v1/completions", json=body, headers=headers
        ) as response:
            if response.status_code != 200:
                self.error = json.loads(await response.aread())["error"]
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: ")))

    def _take(self, chunk: dict) -> None:
        if "error" in chunk:
            self.error = chunk["error"]
            return
        (choice,) = chunk["choices"]
        self.token_ids += choice["token_ids"]
        self.finish_reason = choice["finish_reason"] or self.finish_reason


def expected(count: int) -> list[int]:
    return [formula(PROMPT, 11, position) for position in range(count)]
