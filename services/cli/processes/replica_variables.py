"""Environment variables of services if `stepwell up` starts several replicas. Each replica has its
own metrics address. Variables that only one replica could use are rejected.
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
"""For each service, the settings that name a file or an address of a single process."""


def metrics_of(service: str, replica: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The metrics address of a replica's scheduler or pool, as an environment variable. Replica 0
    has the configured port, and each further replica has the next port. Port 0 stays 0. The result
    is empty if no port is configured.
    """
    address = environ.get(_metrics_variable(service), "")
    if not address or is_host_port(address) is not None:
        return {}  # the service reports the error
    host, port = split_host_port(address)
    return {"metrics_address": join_host_port(host, port + replica if port else 0)}


def of_further_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a worker's ranks above 0. Only rank 0 tells probes about its health, as with
    services.worker.local_ranks.
    """
    of_rank_0 = {env_prefix("worker") + setting.upper() for setting in _OF_ONE_REPLICA["worker"]}
    return {name: text for name, text in environ.items() if name not in of_rank_0}


def check_variables(num_replicas: int, environ: Mapping[str, str]) -> None:
    """Raises CommandError for a variable that would make replicas share a file or an address."""
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
