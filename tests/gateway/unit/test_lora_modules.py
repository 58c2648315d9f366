"""The names that LoRA adapters may have."""

from pathlib import Path

import pytest

from services.common.errors import InvalidArgument
from services.common.process.settings import SettingError
from services.common.request.adapter import Adapter
from services.gateway.adapters.lora_files import lora_modules
from services.gateway.core.lora_modules import MAX_NAME_CHARACTERS, LoraModules


@pytest.mark.parametrize("name", ["", "a" * 257, "a\nb", "a\rb", "a\0b", "a\x1b[31mb", "a\u2028b"])
def test_a_name_is_1_to_256_printable_characters(name: str) -> None:
    modules = LoraModules("demo")

    with pytest.raises(InvalidArgument, match="lora_name must be 1 to 256 printable") as refused:
        modules.add(Adapter(b"digest", name, "/adapters/a"))

    assert refused.value.field == "lora_name"
    assert not list(modules)


@pytest.mark.parametrize("name", ["sql", "org/sql v2", "Größe-模型", "a" * MAX_NAME_CHARACTERS])
def test_names_of_any_language_are_kept_as_they_are(name: str) -> None:
    modules = LoraModules("demo")

    modules.add(Adapter(b"digest", name, "/adapters/a"))

    assert [adapter.name for adapter in modules] == [name]


@pytest.mark.parametrize("name", ["s" * 100_000, "two\nlines"])
def test_a_bad_name_on_the_command_line_is_one_short_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")

    with pytest.raises(
        SettingError, match=r"--lora-modules .*lora_name must be 1 to 256"
    ) as refused:
        lora_modules("demo", [f"{name}={tmp_path}"])

    assert len(str(refused.value)) < 500
    assert str(refused.value).isprintable()
