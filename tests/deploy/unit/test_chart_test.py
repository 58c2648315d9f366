"""The pod of `helm test` completes a text, with an API key if clients need one."""

import pytest

from services.cli.__main__ import main
from tests.cli.small_server import small_server
from tests.deploy.conftest import example, render_chart
from tests.deploy.rendered import Rendered


def test_it_continues_a_text_with_its_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"apiKeys": {"existingSecret": "keys", "key": "plain"}}
    values = example("small", gateway=keys, test={"apiKeySecret": "keys", "prompt": "one two"})
    container = render_chart({"keys": values})["keys"].pod("test").containers()[0]
    for name, value in container.environment().items():
        monkeypatch.setenv(name, value)
    with small_server() as server:
        assert main(_command(container.spec["command"], server.url)) == 0
        assert server.keys[-1] == "Bearer secret"
        assert server.bodies[-1]["max_tokens"] == 8
    assert capsys.readouterr().out == "one.two.\n"


def test_it_asks_the_service_of_the_gateway(releases: dict[str, Rendered]) -> None:
    """The URL has the port of the Kubernetes Service, which may differ from the pods' port."""
    release = releases["everything"]
    command = release.pod("test").containers()[0].spec["command"]
    assert "http://stepwell-gateway.llm.svc:80" in command
    service = next(one for one in release.of("Service") if one["spec"].get("type"))
    assert service["metadata"]["name"] == "stepwell-gateway"
    assert 80 in [port["port"] for port in service["spec"]["ports"]]


def _command(command: list[str], url: str) -> list[str]:
    """The command's arguments after `python3 -m services.cli`, with `url` as its URL."""
    program, arguments = command[:3], command[3:]
    assert program == ["python3", "-m", "services.cli"]
    at = arguments.index("--url") + 1
    return [*arguments[:at], url, *arguments[at + 1 :]]
