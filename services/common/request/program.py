"""What a client says about the program that a request is a turn of."""

from collections.abc import Iterable
from dataclasses import dataclass

from services.common.errors import InvalidArgument

MAX_PROGRAM_ID_BYTES = 256
MAX_TOOL_BYTES = 256
MAX_KEEP_SECONDS = 3600
"""The longest time for which a context is kept because the client wishes it."""


def joined_tools(names: Iterable[str]) -> str:
    """One name for the tools that run after a turn, of at most MAX_TOOL_BYTES."""
    return ",".join(sorted(set(names))).encode()[:MAX_TOOL_BYTES].decode(errors="ignore")


@dataclass(frozen=True, slots=True)
class DeclaredProgram:
    """What a client says about a turn. A program is the requests of one run of an agent."""

    id: str
    parent_id: str = ""
    """The program that started this one, and waits for it."""
    tool: str = ""
    """The tool that runs after the answer. Empty if the answer shows it."""
    ends: bool = False
    """Whether the turn is the program's last."""
    keep_seconds: int = 0
    """The time for which the client wishes to keep the context after the turn. More than
    MAX_KEEP_SECONDS counts as these.
    """

    def check(self) -> None:
        """Raises InvalidArgument, which names the field."""
        for field, text in (("id", self.id), ("parent_id", self.parent_id)):
            if len(text.encode()) > MAX_PROGRAM_ID_BYTES or not (text.isprintable()):
                raise InvalidArgument(
                    f"program.{field} may have {MAX_PROGRAM_ID_BYTES} bytes, none of them of a "
                    "control character",
                    field=f"program.{field}",
                )
        if len(self.tool.encode()) > MAX_TOOL_BYTES:
            raise InvalidArgument(
                f"program.tool may be {MAX_TOOL_BYTES} bytes long", field="program.tool"
            )
        for field, is_given in (
            ("parent_id", self.parent_id),
            ("tool", self.tool),
            ("ends", self.ends),
        ):
            if is_given and not self.id:
                raise InvalidArgument(
                    f"program.{field} needs an id of the program", field=f"program.{field}"
                )
        if self.id and self.parent_id == self.id:
            raise InvalidArgument(
                "program.parent_id is the program's own id", field="program.parent_id"
            )
