"""Variables of services in the environment of `stepwell up`, where there are several replicas.

Addresses of metrics become one for each replica, and what only one replica can have is refused.
"""

from collections.abc import Mapping

from services.cli.errors import CommandError
from services.common.process.settings import env_prefix
from services.common.rpc.addresses import is_host_port, join_host_port, split_host_port

_METRICS_SERVICES = ("scheduler", "kvpool")
_OF_ONE_REPLICA = {
    "scheduler": (
        "health_address",
        "health_file",
        "advertise_address",
        "step_log",
        "vllm_grpc_address",
        "kv_events_endpoint",
        "kv_events_replay_endpoint",
    ),
    "kvpool": ("health_address", "health_file"),
    "worker": ("health_address", "health_file"),
}
"""Settings by service that name a file or an address of one process."""


def metrics_of(service: str, replica: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Where the scheduler or pool of a replica serves its metrics: the port of the variable is that
    of replica 0, and each further replica has the next one; port 0 stays 0. Empty without the
    variable.
    """
    address = environ.get(_metrics_variable(service), "")
    if not address or is_host_port(address) is not None:
        return {}  # the service says what is wrong with it
    host, port = split_host_port(address)
    return {"metrics_address": join_host_port(host, port + replica if port else 0)}


def check_variables(num_replicas: int, environ: Mapping[str, str]) -> None:
    """Raises CommandError for a variable with which replicas would share a file or an address."""
    if num_replicas == 1:
        return
    for service, settings in _OF_ONE_REPLICA.items():
        for setting in settings:
            variable = env_prefix(service) + setting.upper()
            if environ.get(variable):
                raise CommandError(
                    f"{variable} is for a single replica, not {num_replicas}", exit_status=2
                )
    taken: dict[str, str] = {}
    for service in _METRICS_SERVICES:
        variable = _metrics_variable(service)
        for replica in range(num_replicas):
            for address in metrics_of(service, replica, environ).values():
                if is_host_port(address) is not None:
                    raise CommandError(
                        f"{variable} leaves no port for each of {num_replicas} replicas",
                        exit_status=2,
                    )
                if split_host_port(address)[1]:
                    _take(address, variable, num_replicas, taken)


def _take(address: str, variable: str, num_replicas: int, taken: dict[str, str]) -> None:
    other = taken.setdefault(address, variable)
    if other != variable:
        raise CommandError(
            f"{variable} and {other} both give {address} to one of {num_replicas} replicas, which "
            "have ports one after the other",
            exit_status=2,
        )


def _metrics_variable(service: str) -> str:
    return f"{env_prefix(service)}METRICS_ADDRESS"
