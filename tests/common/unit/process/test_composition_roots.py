"""Every service is built in its `__main__.py`, from settings that extend ServiceSettings."""

import ast
import dataclasses
from importlib import import_module
from pathlib import Path

import pytest

from services.common.process.service_settings import ServiceSettings

SERVICES = Path(__file__).parents[4] / "services"


@pytest.mark.parametrize("service", ["gateway", "scheduler", "kvpool", "worker"])
def test_a_service_is_composed_in_the_common_shape(service: str) -> None:
    module = ast.parse((SERVICES / service / "__main__.py").read_text())
    _docstring, *first = map(ast.unparse, module.body[:4])
    assert first == [
        "import gc",
        "import signal",
        "if __name__ == '__main__':\n    gc.disable()\n"
        "    signal.signal(signal.SIGINT, signal.SIG_DFL)",
    ]
    functions = {
        node.name: [argument.arg for argument in node.args.args]
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert functions["main"] == []
    assert functions["serve"] == ["settings", "stop"]
    calls = [ast.unparse(node) for node in ast.walk(module) if isinstance(node, ast.Call)]
    (call,) = [call for call in calls if call.startswith("run_service(")]
    assert call.startswith("run_service(SERVICE, ")
    assert call.endswith(("Settings, serve)", "Settings, serve, prepare)"))


@pytest.mark.parametrize("service", ["gateway", "scheduler", "kvpool", "worker"])
def test_the_settings_of_a_service_extend_those_of_every_service(service: str) -> None:
    module = import_module(f"services.{service}.settings")
    (settings,) = [
        kind
        for kind in vars(module).values()
        if dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__
    ]
    assert issubclass(settings, ServiceSettings)
    (address,) = [field for field in dataclasses.fields(settings) if field.name == "address"]
    assert address.default is not dataclasses.MISSING
