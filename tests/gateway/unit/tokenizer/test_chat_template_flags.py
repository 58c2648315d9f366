"""The settings --chat-template and --default-chat-template-kwargs."""

from pathlib import Path
from typing import Any

import pytest

from services.common.errors import FailedPrecondition, InvalidArgument
from services.common.process.settings import SettingError, parse_settings
from services.gateway.adapters.tokenizer.chat_template_options import ChatTemplateOptions
from services.gateway.adapters.tokenizer.hf_tokenizer import HfTokenizer, load_tokenizer
from services.gateway.settings import GatewaySettings
from tests.gateway.tiny_tokenizer import write_tokenizer

INLINE = "{{ mood }}/{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


async def rendered(tokenizer: HfTokenizer, **variables: Any) -> str:
    return await tokenizer.render_chat(
        [{"role": "user", "content": "hi"}],
        add_generation_prompt=True,
        continue_final_message=False,
        variables=variables,
    )


async def test_a_template_is_a_text_or_a_file(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(INLINE)
    for setting in (INLINE, str(file)):
        tokenizer = load_tokenizer(model, ChatTemplateOptions(setting, {"mood": "glad"}))
        assert await rendered(tokenizer) == "glad/hi"
        assert await rendered(tokenizer, mood="sad") == "sad/hi"
    assert await rendered(load_tokenizer(model)) == "<|user|>hi<|end|><|assistant|>"


async def test_a_template_is_given_to_a_model_without_one(tmp_path: Path) -> None:
    bare = write_tokenizer(tmp_path, chat_template=None)
    with pytest.raises(InvalidArgument, match="no chat template"):
        await rendered(load_tokenizer(bare))
    assert await rendered(load_tokenizer(bare, ChatTemplateOptions(INLINE))) == "/hi"


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("no/such/file.jinja", "no/such/file.jinja cannot be read: No such file or directory"),
        ("{% for m in messages %}", "line 1 of the template: "),
        ("a\n{{ b c }}", "line 2 of the template: "),
    ],
)
def test_a_wrong_template_ends_the_start(model: Path, setting: str, problem: str) -> None:
    with pytest.raises(FailedPrecondition) as refused:
        load_tokenizer(model, ChatTemplateOptions(setting))
    assert refused.value.message.startswith(f"--chat-template: {problem}")


def test_variables_of_the_server_cannot_be_defaults(model: Path) -> None:
    with pytest.raises(FailedPrecondition, match="may not hold 'messages'"):
        load_tokenizer(model, ChatTemplateOptions(variables={"messages": []}))


@pytest.mark.parametrize("flag", ["--default-chat-template-kwargs", "--override-generation-config"])
@pytest.mark.parametrize("text", ["{", "[]", "5", "[" * 100_000])
def test_settings_in_json_are_objects(model: Path, flag: str, text: str) -> None:
    with pytest.raises(SettingError, match=rf"{flag} must be a JSON object"):
        parse_settings(GatewaySettings, "gateway", ["--model", str(model), flag, text], {})
