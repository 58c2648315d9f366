"""The file of further models: what each model has of its own, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.process.settings import SettingError
from services.gateway.models.further_models import further_models
from services.gateway.settings import GatewaySettings


def settings(model: Path, tmp_path: Path, content: Any, **values: Any) -> GatewaySettings:
    path = tmp_path / "models.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return GatewaySettings(model=model, further_models=path, **values)


def test_a_model_has_its_own_settings_and_those_of_the_process(model: Path, tmp_path: Path) -> None:
    entry = {
        "model": str(model),
        "served_model_name": "large",
        "schedulers": ["127.0.0.1:1", "127.0.0.1:2"],
        "reasoning_parser": "qwen3",
        "default_chat_template_kwargs": {"enable_thinking": False},
        "max_concurrent_requests": 7,
        "tool_call_parser": None,
    }
    first = settings(
        model,
        tmp_path,
        [entry],
        tool_call_parser="hermes",
        resubmit_timeout_seconds=5.0,
        api_keys=("k" * 32,),
        trace_address="127.0.0.1:0",
    )
    [model] = further_models(first)
    assert model.model_name == "large"
    assert model.schedulers == ("127.0.0.1:1", "127.0.0.1:2")
    assert model.reasoning_parser == "qwen3"
    assert model.tool_call_parser == ""  # The first model's parser may not fit.
    assert model.chat_template_variables == {"enable_thinking": False}
    assert (model.max_concurrent_requests, model.resubmit_timeout_seconds) == (7, 5.0)
    assert model.api_keys == first.api_keys
    assert model.trace_address is None


OTHER = {"served_model_name": "other", "schedulers": ["127.0.0.1:1"]}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "cannot be read"),
        ({"model": "x"}, "must contain a list of objects"),
        ([OTHER], r"\[0\]\.model must be given"),
        ([{**OTHER, "model": "/none"}], r"\[0\]\.model: "),
        ([{**OTHER, "http_address": "0.0.0.0:1"}], r"\[0\]\.http_address is not a setting of one"),
        ([{**OTHER, "reasoning": "x"}], r"\[0\]\.reasoning is not a setting of one"),
        ([{"model": "MODEL", "served_model_name": "other"}], r"\[0\]\.schedulers must be given"),
        (
            [{**OTHER, "model": "MODEL", "max_concurrent_requests": 0}],
            r"^--further-models: \[0\]\.max_concurrent_requests must be at least 1, not 0",
        ),
        ([{**OTHER, "model": "MODEL", "max_concurrent_requests": True}], "must be a whole number"),
        (
            [{**OTHER, "model": "MODEL", "enable_auto_tool_choice": True}],
            r"^--further-models: \[0\]: --enable-auto-tool-choice needs --tool-call-parser",
        ),
        ([{"model": "MODEL", "schedulers": []}], r"\[0\]\.schedulers must be given"),
        ([{**OTHER, "model": "MODEL", "max_concurrent_requests": "x"}], "must be a whole number"),
        ([{**OTHER, "model": "MODEL"}] * 2, "two models have the name 'other'"),
        ([{**OTHER, "model": "MODEL", "lora_modules": ["first=/x"]}], "the name 'first'"),
    ],
)
def test_a_wrong_file_is_refused_by_name(
    model: Path, tmp_path: Path, content: Any, complaint: str
) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    first = settings(model, tmp_path, text.replace("MODEL", str(model)), served_model_name="first")
    with pytest.raises(SettingError, match=complaint):
        further_models(first)
