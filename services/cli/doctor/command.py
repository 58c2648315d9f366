"""`stepwell doctor`: parses the arguments and prints the report."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from services.cli.doctor.report import json_of, text_of, without_directories
from services.cli.errors import CommandError, CommandParser
from services.common.errors import StepwellError
from services.common.model_source.errors import ModelSourceError
from services.common.model_source.find import find_model, model_name

_DEMO = Path(__file__).parents[3] / "models/demo"


def main(argv: Sequence[str]) -> int:
    parser = CommandParser(
        "doctor",
        description="Prints what this machine has, which kernels are used and why, the limits that "
        "it measures, and the share of them that a short run of a model reaches. A report of a "
        "problem should have it; it has no secrets, host names or directories.",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="directory, GGUF file or name on the hub of the model to run (default: the demo)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    if arguments.model is None and not _DEMO.is_dir():
        parser.error("--model must be given: this installation has no demo model")
    try:
        model = find_model(str(_DEMO) if arguments.model is None else arguments.model)
        return _examine(model, as_json=arguments.json)
    except (ModelSourceError, StepwellError) as error:
        raise CommandError(str(error)) from error


def _examine(model: Path, *, as_json: bool) -> int:
    began = time.monotonic()

    def progress(what: str) -> None:
        line = f"{time.monotonic() - began:5.1f} s  {without_directories(what)}"
        print(line, file=sys.stderr, flush=True)

    progress("importing torch")
    # Imported here, after the first line of progress, since importing torch takes seconds.
    from services.cli.doctor import examination  # noqa: PLC0415

    report = examination.examine(model, model_name(model), progress)
    print(json.dumps(json_of(report), indent=2) if as_json else text_of(report))
    return 0
