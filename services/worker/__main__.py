"""Starts the worker, with compute threads that sleep while they wait.

OpenMP's threads spin by default. With a gateway, a scheduler and a pool beside them on the same
processors that costs an order of magnitude. The library reads the policy when torch loads it.
"""

import os


def main() -> None:
    """Runs the worker until SIGTERM."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from services.worker.process import main as run  # noqa: PLC0415

    run()


if __name__ == "__main__":
    main()
