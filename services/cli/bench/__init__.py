"""`stepwell bench`: sends a load to an OpenAI server and measures it."""

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Runs the command, which is imported here: programs that import a part of this package do not
    need the other parts.
    """
    from services.cli.bench import command  # noqa: PLC0415

    return command.main(argv)
