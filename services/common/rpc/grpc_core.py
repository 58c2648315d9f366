"""Environment variables that grpc's native core reads once, when grpc is first imported."""

from collections.abc import MutableMapping

EXPERIMENTS = "GRPC_EXPERIMENTS"
OLDER_POLLER = "-event_engine_client,-event_engine_listener"
FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"
VERBOSITY = "GRPC_VERBOSITY"
ERRORS = "ERROR"


def tune_grpc(environ: MutableMapping[str, str]) -> None:
    """Chooses grpc's older poller, no support for forks, and a log of errors alone, where the
    environment does not.

    With grpc's event engine each message passes through one more thread on either side. With the
    older poller a message and its answer on a stream between two processes (grpcio 1.85.1, 2 kB, a
    unix socket) take 0.6 of the time, and of the processor time. A later grpc without these
    experiments logs one line. With fork support grpc logs a line for each process that is started.
    Below errors it logs a line for each TLS handshake that fails; strangers may cause many.
    """
    environ.setdefault(EXPERIMENTS, OLDER_POLLER)
    environ.setdefault(FORK_SUPPORT, "0")
    environ.setdefault(VERBOSITY, ERRORS)


def silence_grpc(environ: MutableMapping[str, str]) -> None:
    """Turns off the log of grpc's core, in a process that expects to lose connections."""
    if environ.get(VERBOSITY, ERRORS) == ERRORS:
        environ[VERBOSITY] = "NONE"
