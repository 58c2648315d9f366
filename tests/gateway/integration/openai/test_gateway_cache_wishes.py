"""The time for which a client wants its prompt to stay cached is sent to the scheduler."""

from typing import Any

import pytest

from tests.gateway.serving import Serving

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
WISHES: dict[str, Any] = {
    "/v1/chat/completions": CHAT | {"prompt_cache_retention": "24h"},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2, "prompt_cache_options": {"ttl": "1d"}},
    "/v1/messages": CHAT | {"cache_control": {"type": "ephemeral", "ttl": "24h"}},
}


@pytest.mark.parametrize("path", WISHES)
async def test_the_usage_says_that_an_hour_counts(served: Serving, path: str) -> None:
    answer = await served.http.post(path, json={"model": "tiny", **WISHES[path]})
    assert answer.json()["usage"]["prompt_cache_ttl"] == "1h"
    (added,) = served.scheduler.adds
    assert (added.program.id, added.program.keep_seconds) == ("", 86_400)


async def test_shorter_wishes_count_whole(served: Serving) -> None:
    body = {"model": "tiny", "job_id": "job", **CHAT, "prompt_cache_options": {"ttl": "1h"}}
    answer = await served.http.post("/v1/chat/completions", json=body)
    assert "prompt_cache_ttl" not in answer.json()["usage"]
    (added,) = served.scheduler.adds
    assert (added.program.id, added.program.keep_seconds) == ("job", 3600)
