"""`stepwell bench`: sends a load to an OpenAI server and measures it."""

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    # Programs that import only parts of this package do not import the command.
    from services.cli.bench import command  # noqa: PLC0415

    return command.main(argv)
