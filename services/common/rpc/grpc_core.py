"""Environment variables that grpc's native core reads once, when grpc is first imported."""

from collections.abc import MutableMapping

EXPERIMENTS = "GRPC_EXPERIMENTS"
OLDER_POLLER = "-event_engine_client,-event_engine_listener"
FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"
VERBOSITY = "GRPC_VERBOSITY"
ERRORS = "ERROR"


def tune_grpc(environ: MutableMapping[str, str]) -> None:
    """Sets defaults for grpc: its older poller, no fork support, and a log of errors only.

    Values in the environment take precedence. With grpc's event engine each message passes through
    an additional thread on each side. With the older poller, a message and its response on a stream
    take 0.6 times as long, and 0.6 times the processor time (grpcio 1.85.1, messages of 2 kB, Unix
    socket). A later version of grpc that lacks the experiments in OLDER_POLLER logs one line. With
    fork support grpc logs a line for each started process. At levels below error, grpc logs each
    failed TLS handshake, and anyone who can connect can cause many failures.
    """
    environ.setdefault(EXPERIMENTS, OLDER_POLLER)
    environ.setdefault(FORK_SUPPORT, "0")
    environ.setdefault(VERBOSITY, ERRORS)


def silence_grpc(environ: MutableMapping[str, str]) -> None:
    """Turns off the log of grpc's core, for a process whose connections are expected to break."""
    if environ.get(VERBOSITY, ERRORS) == ERRORS:
        environ[VERBOSITY] = "NONE"
