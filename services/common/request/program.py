"""The fields by which a client declares that a request belongs to a program (an agent's run)."""

from collections.abc import Iterable
from dataclasses import dataclass

from services.common.errors import InvalidArgument

MAX_PROGRAM_ID_BYTES = 256
MAX_TOOL_BYTES = 256
MAX_KEEP_SECONDS = 3600
"""The longest time for which a client can have the KV blocks of a turn kept for the next turn."""


def joined_tools(names: Iterable[str]) -> str:
    """Joins the names of the tools that run after a turn into one name."""
    return ",".join(sorted(set(names))).encode()[:MAX_TOOL_BYTES].decode(errors="ignore")


@dataclass(frozen=True, slots=True)
class DeclaredProgram:
    """A client's description of a turn. A program consists of the requests of one run of an agent,
    and each request is a turn.
    """

    id: str
    parent_id: str = ""
    """The id of the program that started this program and waits for it."""
    tool: str = ""
    """The name of the tool that runs after the turn. If empty, the output's tool calls name it."""
    ends: bool = False
    """Whether the turn is the program's last."""
    keep_seconds: int = 0
    """For how long the turn's KV blocks are kept for the next turn, at most MAX_KEEP_SECONDS."""

    def check(self) -> None:
        """Raises InvalidArgument, which names the first invalid field."""
        for field, text in (("id", self.id), ("parent_id", self.parent_id)):
            if len(text.encode()) > MAX_PROGRAM_ID_BYTES or not (text.isprintable()):
                raise InvalidArgument(
                    f"program.{field} may have at most {MAX_PROGRAM_ID_BYTES} bytes and no control "
                    "characters",
                    field=f"program.{field}",
                )
        if len(self.tool.encode()) > MAX_TOOL_BYTES:
            raise InvalidArgument(
                f"program.tool may have at most {MAX_TOOL_BYTES} bytes", field="program.tool"
            )
        for field, is_given in (
            ("parent_id", self.parent_id),
            ("tool", self.tool),
            ("ends", self.ends),
        ):
            if is_given and not self.id:
                raise InvalidArgument(f"program.{field} needs program.id", field=f"program.{field}")
        if self.id and self.parent_id == self.id:
            raise InvalidArgument(
                "program.parent_id must not equal program.id", field="program.parent_id"
            )
