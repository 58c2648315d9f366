"""How grpc is loaded by whoever imports a service."""

import os
import subprocess
import sys

from services.common.grpc_core import EXPERIMENTS, OLDER_POLLER, tune_grpc


def test_the_older_poller_is_chosen_where_nothing_is() -> None:
    environ: dict[str, str] = {}
    tune_grpc(environ)
    assert environ == {EXPERIMENTS: OLDER_POLLER}


def test_who_sets_the_variable_decides() -> None:
    environ = {EXPERIMENTS: ""}
    tune_grpc(environ)
    assert environ == {EXPERIMENTS: ""}


def test_it_is_chosen_before_grpc_is_there() -> None:
    script = (
        "import os, sys, services; assert 'grpc' not in sys.modules; "
        f"print(os.environ['{EXPERIMENTS}'])"
    )
    environ = {name: value for name, value in os.environ.items() if name != EXPERIMENTS}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == OLDER_POLLER
