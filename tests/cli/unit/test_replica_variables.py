"""Environment variables of the services under `stepwell up --replicas N`."""

from pathlib import Path

import pytest

from services.cli.errors import CommandError
from services.cli.processes.plan import Addresses, stages
from services.cli.processes.replica_variables import check_variables
from services.cli.settings import UpSettings

SCHEDULER, KVPOOL = "STEPWELL_SCHEDULER_METRICS_ADDRESS", "STEPWELL_KVPOOL_METRICS_ADDRESS"


def served(tmp_path: Path, replicas: int, **environ: str) -> dict[str, str | None]:
    """Maps the name of each scheduler and kvpool to the address at which it serves metrics."""
    check_variables(replicas, environ)
    settings = UpSettings(model=tmp_path, replicas=replicas)
    addresses = Addresses("127.0.0.1", 8000, 9000, tmp_path)
    return {
        spec.name: spec.environ.get(variable)
        for stage in stages(settings, addresses, environ)
        for spec in stage.specs
        for service, variable in (("scheduler", SCHEDULER), ("kvpool", KVPOOL))
        if spec.name.startswith(service)
    }


def test_each_replica_serves_its_metrics_on_the_next_port(tmp_path: Path) -> None:
    assert served(tmp_path, 3, **{SCHEDULER: "[::1]:9101", KVPOOL: "[::1]:9201"}) == {
        "scheduler-0": "[::1]:9101",
        "scheduler-1": "[::1]:9102",
        "scheduler-2": "[::1]:9103",
        "kvpool-0": "[::1]:9201",
        "kvpool-1": "[::1]:9202",
        "kvpool-2": "[::1]:9203",
    }
    assert served(tmp_path, 1, **{SCHEDULER: "[::1]:9101"}) == {
        "scheduler": "[::1]:9101",
        "kvpool": None,
    }


def test_free_ports_stay_free_ones(tmp_path: Path) -> None:
    found = served(tmp_path, 2, **{SCHEDULER: "127.0.0.1:0", KVPOOL: "127.0.0.1:0"})
    assert set(found.values()) == {"127.0.0.1:0"}


def test_what_is_no_address_is_left_to_the_service_to_refuse(tmp_path: Path) -> None:
    assert served(tmp_path, 2, **{SCHEDULER: "9101"})["scheduler-1"] == "9101"


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({SCHEDULER: "127.0.0.1:65535"}, f"{SCHEDULER} leaves no port for each of 2 replicas"),
        (
            {SCHEDULER: "127.0.0.1:9101", KVPOOL: "127.0.0.1:9102"},
            f"{KVPOOL} and {SCHEDULER} both give 127.0.0.1:9102 to one of 2 replicas, which have "
            "ports one after the other",
        ),
        (
            {"STEPWELL_SCHEDULER_STEP_LOG": "/var/log/steps"},
            "STEPWELL_SCHEDULER_STEP_LOG is for a single replica, not 2",
        ),
        (
            {"STEPWELL_SCHEDULER_VLLM_GRPC_ADDRESS": "127.0.0.1:9100"},
            "STEPWELL_SCHEDULER_VLLM_GRPC_ADDRESS is for a single replica, not 2",
        ),
        (
            {"STEPWELL_WORKER_HEALTH_ADDRESS": "127.0.0.1:9300"},
            "STEPWELL_WORKER_HEALTH_ADDRESS is for a single replica, not 2",
        ),
    ],
)
def test_what_replicas_cannot_share_is_refused(environ: dict[str, str], sentence: str) -> None:
    check_variables(1, environ)
    with pytest.raises(CommandError) as refused:
        check_variables(2, environ)
    assert str(refused.value) == sentence
