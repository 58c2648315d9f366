"""The programs that a scheduler knows, and their contexts."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import ContextId
from services.scheduler.core.request import Request

_LEAST_ENDED = 5
"""Programs of an application that must have ended before its statistics are used."""
_NUM_KEPT = 400
_MAX_APPLICATIONS = 1024
"""Applications whose statistics are kept."""
_MAX_DEPTH = 32
"""Programs with more programs above them have no parent."""
CHILD = "child"
"""The tool of a program whose children run."""
_FIRST_TURNS = 8.0
"""The number of turns that are expected while no program has ended."""


@dataclass(slots=True, eq=False)
class Program:
    """The requests of one run of an agent."""

    application: BlockHash | None
    arrived: float
    tenant: bytes = b""
    label: str = ""
    """The client's id, or a number."""
    last_active: float = 0.0
    """When a turn ended last."""
    name: "ProgramName | None" = None
    """What the client calls it. None if the client does not name it."""
    parent: "Program | None" = None
    num_children: int = 0
    """Programs that it started and that have not ended."""
    depth: int = 0
    """Number of programs above it."""
    num_turns: int = 0
    """Turns that have begun."""
    num_running: int = 0
    """Turns that have not ended."""
    num_tokens: int = 0
    """Tokens that its turns had to compute, and have generated."""
    has_ended: bool = False
    contexts: dict[ContextId, "Context"] = field(default_factory=dict)
    """Its contexts in a pause, the oldest first."""


@dataclass(slots=True, eq=False)
class Context:
    """What is retained of a turn that has ended."""

    id: ContextId
    program: Program
    last_hash: BlockHash
    num_tokens: int
    paused_at: float
    tool: str = ""
    traceparent: str = ""
    """The trace context of the turn that left it."""
    num_blocks: int = 0
    """Its blocks that the pool still has, as far as is known."""
    num_own_blocks: int = 0
    """Those among them that would become free without this context."""
    returned_at: float | None = None
    """When the next turn arrived. None in the pause."""

    @property
    def reason(self) -> str:
        """The tool for which the program pauses. CHILD if it waits for programs that it started."""
        return CHILD if self.program.num_children else self.tool


@dataclass(slots=True)
class _Ended:
    """The turns and tokens of ended programs."""

    turns: deque[int] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    tokens: deque[int] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    expected: dict[int, float] = field(default_factory=dict)
    """The results of `expected_tokens` since the last program ended."""

    def add(self, program: Program) -> None:
        self.turns.append(program.num_turns)
        self.tokens.append(program.num_tokens)
        self.expected.clear()

    def expected_tokens(self, num_turns: int) -> float:
        """The tokens of the turns after `num_turns`. If no program had so many, half a turn."""
        if (known := self.expected.get(num_turns)) is None:
            known = self.expected[num_turns] = self._expected_tokens(num_turns)
        return known

    def _expected_tokens(self, num_turns: int) -> float:
        more = [turns - num_turns for turns in self.turns if turns > num_turns]
        each = sum(self.tokens) / sum(self.turns)
        return each * (fmean(more) if more else 0.5)


class EndedPrograms:
    """The statistics of programs that have ended, by application."""

    def __init__(self) -> None:
        self._of: OrderedDict[BlockHash | None, _Ended] = OrderedDict()
        """By application, the least recently used first."""
        self._all = _Ended()

    def add(self, program: Program) -> None:
        if program.application not in self._of:
            self._of[program.application] = _Ended()
            if len(self._of) > _MAX_APPLICATIONS:
                self._of.popitem(last=False)
        self._of.move_to_end(program.application)
        self._of[program.application].add(program)
        self._all.add(program)

    def expected_tokens(self, program: Program) -> float:
        """The expected work of a program's next turn and those after it, in tokens."""
        num_before = max(0, program.num_turns - 1)
        own = self._of.get(program.application)
        for ended in (own, self._all):
            if ended is not None and len(ended.turns) >= _LEAST_ENDED:
                return ended.expected_tokens(num_before)
        return max(1.0, _FIRST_TURNS - num_before)


ProgramName = tuple[bytes, bytes, str, str]
"""The tenant, the adapter, the cache salt and the client's id of a program."""


class NamedPrograms:
    """The programs that clients name."""

    def __init__(self, most: int) -> None:
        """If more than `most` are known, those that have been idle for longest are forgotten."""
        self._most = most
        self._programs: OrderedDict[ProgramName, Program] = OrderedDict()
        """The least recently used first."""

    def __len__(self) -> int:
        return len(self._programs)

    def find(self, request: Request) -> Program | None:
        """The unfinished program that a request names."""
        name = _name_of(request)
        program = None if name is None else self._programs.get(name)
        return None if program is None or program.has_ended else program

    def add(self, request: Request, program: Program) -> Program | None:
        """Stores a program under the name in a request, and its parent. Returns a program that is
        forgotten for it. Does nothing if the request names none.
        """
        name, declared = _name_of(request), request.program
        if name is None or declared is None:
            return None
        forgotten = None
        if name not in self._programs and len(self._programs) >= self._most:
            idle = (one for one in self._programs.values() if not one.num_running)
            if (forgotten := next(idle, None)) is not None:
                self.remove(forgotten)
        self._programs[name] = program
        self._programs.move_to_end(name)
        program.name, program.label = name, declared.id
        parent = self._programs.get((*name[:3], declared.parent_id))
        if program.parent is None and parent is not None and _may_start(parent, program):
            program.parent, program.depth = parent, parent.depth + 1
            parent.num_children += 1
        return forgotten

    def remove(self, program: Program) -> None:
        if program.name is not None and self._programs.get(program.name) is program:
            del self._programs[program.name]


def _may_start(parent: Program, child: Program) -> bool:
    """Whether a program can be the parent of another one: the links must form no circle."""
    ancestor: Program | None = parent
    while ancestor is not None:
        if ancestor is child:
            return False
        ancestor = ancestor.parent
    return parent.depth < _MAX_DEPTH


def _name_of(request: Request) -> ProgramName | None:
    declared = request.program
    if declared is None or not declared.id:
        return None
    return request.tenant, request.adapter_digest, request.cache_salt, declared.id


def application_of(hashes: Sequence[BlockHash], block_size: int) -> BlockHash | None:
    """The hash of about the first 64 tokens of a program's first prompt."""
    return hashes[min(len(hashes), -(-64 // block_size)) - 1] if hashes else None
