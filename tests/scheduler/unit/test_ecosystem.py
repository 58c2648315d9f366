"""Interfaces for gateways and routers of other projects are imported only if they are enabled."""

import subprocess
import sys

import pytest

from services.common.errors import InvalidArgument
from services.scheduler import ecosystem
from services.scheduler.settings import SchedulerSettings

SETTINGS = {"kvpool": "127.0.0.1:1", "workers": ("127.0.0.1:2",)}


@pytest.mark.parametrize(
    ("setting", "value", "packages"),
    [
        ("vllm_grpc_address", "127.0.0.1:0", "smg_grpc_proto"),
        ("kv_events_endpoint", "tcp://*:5557", "zmq and msgspec"),
    ],
)
def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, setting: str, value: str, packages: str
) -> None:
    monkeypatch.setattr(ecosystem, "find_spec", lambda _: None)
    flag = "--" + setting.replace("_", "-")
    with pytest.raises(InvalidArgument, match=f"{flag} needs {packages}: pip install") as caught:
        ecosystem.Ecosystem(SchedulerSettings(**SETTINGS, **{setting: value}))
    assert caught.value.field == setting


def test_events_are_not_sent_again_where_they_are_not_sent() -> None:
    with pytest.raises(InvalidArgument, match="needs --kv-events-endpoint"):
        ecosystem.Ecosystem(SchedulerSettings(**SETTINGS, kv_events_replay_endpoint="tcp://*:1"))


def test_nothing_is_recorded_unless_something_needs_it() -> None:
    assert ecosystem.Ecosystem(SchedulerSettings(**SETTINGS)).recorder is None
    wanted = SchedulerSettings(**SETTINGS, vllm_grpc_address="127.0.0.1:0")
    assert ecosystem.Ecosystem(wanted).recorder is not None


def test_a_scheduler_without_them_imports_none_of_the_packages() -> None:
    code = (
        "import sys, services.scheduler.__main__;"
        "print({'smg_grpc_proto', 'zmq', 'msgspec'} & set(sys.modules))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == "set()"
