"""`stepwell bench`: sends a load to an OpenAI server and measures it."""

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Runs the command. It is imported here, since other programs import parts of this package."""
    from services.cli.bench import command  # noqa: PLC0415

    return command.main(argv)
