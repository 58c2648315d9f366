"""Starts the worker, with libraries' threads as they serve it.

OpenMP's threads spin by default. With a gateway, a scheduler and a pool beside them on the same
processors that costs up to an order of magnitude, and by itself it gains nothing. numpy's OpenBLAS
starts a thread for every processor, of which nothing here makes use. Both libraries read what they
are told when they are loaded.
"""

import os


def main() -> None:
    """Runs the worker until SIGTERM."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from services.worker.process import main as run  # noqa: PLC0415

    run()


if __name__ == "__main__":
    main()
