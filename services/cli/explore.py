"""`stepwell explore`: searches for faults. Runs all services in one process, in virtual time."""

import sys
from collections.abc import Sequence
from pathlib import Path

from services.cli.errors import CommandError, CommandParser
from services.simulation.runtime.machine import install


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("explore", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/demo"), help="model directory")
    parser.add_argument("--seeds", type=int, default=100, help="number of seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of these seeds")
    parser.add_argument("--seed", type=int, help="run this seed only, and print its log")
    arguments = parser.parse_args(argv)
    if arguments.seeds < 1:
        raise CommandError("--seeds must be at least 1", exit_status=2)
    if not (arguments.model / "config.json").exists():
        raise CommandError(f"{arguments.model} is not a model directory")
    install()
    _import_tokenizers()
    # Imported after `install` has replaced Python's clocks, which the modules may store.
    from services.cli.replay.log_check import log_differences  # noqa: PLC0415
    from services.simulation.explore.search import replay, search  # noqa: PLC0415

    if arguments.seed is not None:
        return replay(arguments.model, arguments.seed, log_differences)
    first = arguments.first
    return search(arguments.model, range(first, first + arguments.seeds), log_differences)


def _import_tokenizers() -> None:
    """Imports the part of transformers that reads tokenizers, before torch and as if torch were not
    installed. With torch, transformers would import torch's compiler, which takes a third of the
    startup time.
    """
    from services.gateway.adapters.tokenizer.transformers_package import (  # noqa: PLC0415
        import_auto_tokenizer,
    )

    sys.modules["torch"] = None  # type: ignore[assignment]
    import_auto_tokenizer()
    del sys.modules["torch"]
