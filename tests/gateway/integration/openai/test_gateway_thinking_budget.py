"""The field `thinking_token_budget` of a chat request reaches the scheduler."""

from pathlib import Path
from typing import Any

from stepwell.common.v1 import common_pb2

from tests.gateway.serving import serving
from tests.gateway.tiny_tokenizer import SPECIAL, write_tokenizer

THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}{{ opening }}"
CHAT = "/v1/chat/completions"


async def test_a_budget_travels_with_the_marks_and_the_state_of_the_prompt(tmp_path: Path) -> None:
    special = (*SPECIAL, "<think>", "</think>")
    model = write_tokenizer(tmp_path, chat_template=THINKS, special=special)
    async with serving(model, reasoning_parser="qwen3") as served:
        begin, end = served.tokens("<think>"), served.tokens("</think>")

        async def asked(opening: str, **body: Any) -> common_pb2.SamplingParams:
            variables = {"chat_template_kwargs": {"opening": opening}}
            turn = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 2}
            answer = await served.http.post(CHAT, json={**turn, **variables, **body})
            assert answer.status_code == 200, answer.text
            sampling: common_pb2.SamplingParams = served.scheduler.adds[-1].sampling
            return sampling

        def budget(num_tokens: int, *, inside: bool) -> common_pb2.ThinkingBudget:
            return common_pb2.ThinkingBudget(
                num_tokens=num_tokens,
                start_token_ids=begin,
                end_token_ids=end,
                begins_inside=inside,
            )

        ahead = await asked("", thinking_token_budget=5)
        assert ahead.thinking_budget == budget(5, inside=False)
        assert len(begin) == len(end) == 1
        inside = await asked("<think>", thinking_token_budget=0)
        assert inside.thinking_budget == budget(0, inside=True)
        for opening, body in (
            ("<think></think>", {"thinking_token_budget": 5}),
            ("<think>", {"thinking_token_budget": -1}),
            ("<think>", {}),
        ):
            assert not (await asked(opening, **body)).HasField("thinking_budget")
        wrong = await served.http.post(
            CHAT, json={"messages": [{"role": "user", "content": "a"}], "thinking_token_budget": -2}
        )
        assert wrong.json()["error"]["param"] == "thinking_token_budget"


async def test_anthropics_budget_is_a_bound(tmp_path: Path) -> None:
    special = (*SPECIAL, "<think>", "</think>")
    model = write_tokenizer(tmp_path, chat_template=THINKS, special=special)
    body = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 2}
    for parser, numbers in (("qwen3", [1024, 0]), ("", [0, 0])):
        async with serving(model, reasoning_parser=parser) as served:
            for thinking in (
                {"type": "enabled", "budget_tokens": 1024},
                {"type": "adaptive", "budget_tokens": 1024},
            ):
                answer = await served.http.post("/v1/messages", json=body | {"thinking": thinking})
                assert answer.status_code == 200, answer.text
            asked = [add.sampling.thinking_budget.num_tokens for add in served.scheduler.adds]
            assert asked == numbers


async def test_a_server_that_tells_no_reasoning_apart_refuses_it(tmp_path: Path) -> None:
    async with serving(write_tokenizer(tmp_path)) as served:
        for path, prompt in (
            (CHAT, {"messages": [{"role": "user", "content": "the"}]}),
            ("/v1/completions", {"prompt": "the"}),
        ):
            answer = await served.http.post(path, json={**prompt, "thinking_token_budget": 4})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "thinking_token_budget")
            assert "reasoning" in error["message"]
