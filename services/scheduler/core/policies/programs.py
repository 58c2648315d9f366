"""The programs that a scheduler knows, and their contexts.

A program is the requests of one run of an agent. Each request is a turn. Between two turns, in a
pause, a tool runs. A context is the blocks that an ended turn leaves in the pool.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from services.common.errors import InvalidArgument
from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import ContextId
from services.common.request.program import MAX_KEEP_SECONDS
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.program_turn import PausedProgram
from services.scheduler.core.request import Request

PROGRAM_SETTINGS = ("program_idle_seconds", "max_num_programs")
"""The fields of SchedulerConfig that this module uses."""
_MAX_DEPTH = 32
"""Limit on the number of a program's ancestors. A program that would have more gets no parent."""
CHILD = "child"
"""Used in place of a tool's name while a program waits for programs that it started."""


@dataclass(slots=True, eq=False)
class Program:
    """A program, with sums over its turns."""

    application: BlockHash | None
    arrived: float
    tenant: bytes = b""
    weight: float = 1.0
    """The tenant's weight when blocks of contexts are divided among tenants."""
    label: str = ""
    """The id that the client gave the program, or # and a number."""
    last_active: float = 0.0
    """The time at which a turn of the program last ended."""
    name: "ProgramName | None" = None
    """The client's name for the program. None if it gave none."""
    parent: "Program | None" = None
    num_children: int = 0
    """Number of programs that this program started and that have not ended."""
    depth: int = 0
    num_turns: int = 0
    """Number of turns that have arrived."""
    num_running: int = 0
    """Number of turns that have arrived and have not ended."""
    num_tokens: int = 0
    """Number of tokens of ended turns that were not cached, including output tokens."""
    has_ended: bool = False
    contexts: dict[ContextId, "Context"] = field(default_factory=dict)
    """The program's contexts whose next turn has not arrived, the oldest first."""

    @property
    def has_family(self) -> bool:
        return self.parent is not None or self.num_children > 0


@dataclass(slots=True, eq=False)
class Context:
    """The blocks that an ended turn left in the pool."""

    id: ContextId
    program: Program
    last_hash: BlockHash
    num_tokens: int
    paused_at: float
    prompt_hash: BlockHash | None = None
    """Hash of the last full block of the turn's prompt. None if the prompt fills no block, or if
    the turn was aborted before the block was hashed.
    """
    num_prompt_tokens: int = 0
    tool: str = ""
    traceparent: str = ""
    """The `traceparent` of the turn that left this context."""
    num_blocks: int = 0
    """Number of the context's blocks that are still cached, as last reported by the pool."""
    num_own_blocks: int = 0
    """Number of the context's cached blocks that are free and in no other context."""
    returned_at: float | None = None
    """The time at which the next turn arrived. None during the pause."""
    num_turns: int = 1
    """Number of turns so far in the conversation. A program has several if its turns overlap."""
    began: float = 0.0
    """The time at which the conversation's first turn arrived."""
    keep_seconds: int = 0
    """How long, from the end of the turn, the client wants the context to be kept."""

    @property
    def reason(self) -> str:
        """The tool that runs in the pause, or CHILD if the program waits for its children."""
        return CHILD if self.program.num_children else self.tool

    def paused_program(self, now: float) -> PausedProgram:
        """A description of the program and its pause, for views."""
        program = self.program
        return PausedProgram(
            program.label,
            program.tenant,
            self.reason,
            now - self.paused_at,
            program.num_turns,
            self.num_tokens,
            self.num_blocks,
        )

    def describe(self, request: Request, now: float) -> None:
        """Describes the pause that a request's arrival ends, in the request's `program_turn`."""
        turn = request.program_turn
        assert turn is not None
        turn.tool, turn.pause_seconds = self.reason, now - self.paused_at
        turn.traceparent_before = self.traceparent
        if self.last_hash in request.block_hashes:
            turn.num_context_tokens = self.num_tokens
        elif self.prompt_hash in request.block_hashes:
            turn.num_context_tokens = self.num_prompt_tokens


ProgramName = tuple[bytes, bytes, str, str]
"""A program's name: tenant, adapter, cache salt, and the client's id for the program."""


class NamedPrograms:
    """The programs that clients name."""

    def __init__(self, most: int) -> None:
        """If there are more than `most` programs, the longest idle programs are forgotten."""
        self._most = most
        self._programs: OrderedDict[ProgramName, Program] = OrderedDict()
        """In the order of use, the least recently used program first."""

    def __len__(self) -> int:
        return len(self._programs)

    def find(self, request: Request) -> Program | None:
        """The program that a request names. None if it names no known program."""
        name = _name_of(request)
        program = None if name is None else self._programs.get(name)
        return None if program is None or program.has_ended else program

    def add(self, request: Request, program: Program) -> Program | None:
        """Stores a program under the name that a request gives it, if any, and sets the program's
        parent. Returns a program that is forgotten because too many are stored, or None.
        """
        name, declared = _name_of(request), request.program
        if name is None or declared is None:
            return None
        if program.name not in (None, name):
            self.remove(program)
        forgotten = None
        if name not in self._programs and len(self._programs) >= self._most:
            idle = (one for one in self._programs.values() if not one.num_running)
            if (forgotten := next(idle, None)) is not None:
                self.remove(forgotten)
        self._programs[name] = program
        self._programs.move_to_end(name)
        program.name, program.label = name, declared.id
        parent = self.parent_of(request)
        if program.parent is None and parent is not None and _may_start(parent, program):
            program.parent, program.depth = parent, parent.depth + 1
            parent.num_children += 1
        return forgotten

    def parent_of(self, request: Request) -> Program | None:
        name, declared = _name_of(request), request.program
        if name is None or declared is None:
            return None
        return self._programs.get((*name[:3], declared.parent_id))

    def remove(self, program: Program) -> None:
        if program.name is not None and self._programs.get(program.name) is program:
            del self._programs[program.name]


def _may_start(parent: Program, child: Program) -> bool:
    """Whether `parent` can be the parent of `child`. Programs must not be their own ancestors."""
    return parent.depth < _MAX_DEPTH and not _descends(parent, child)


def _descends(program: Program | None, ancestor: Program) -> bool:
    """Whether a program is `ancestor`, or was started by it, directly or indirectly."""
    while program is not None:
        if program is ancestor:
            return True
        program = program.parent
    return False


def _name_of(request: Request) -> ProgramName | None:
    declared = request.program
    if declared is None or not declared.id:
        return None
    return request.tenant, request.adapter_digest, request.cache_salt, declared.id


class KnownPrograms:
    """All programs. A request belongs to a program if it names the program, or if it begins with
    the tokens of one of the program's contexts.

    A context is found by the hash of its last full block, or of the last full block of its turn's
    prompt. The prompt's hash is needed because many chat templates change an answer in the next
    prompt: they leave out the reasoning, or write tool calls with other spaces.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._idle_seconds = config.program_idle_seconds
        self._most = config.max_num_programs
        self._paused: dict[ContextId, Context] = {}
        """Contexts whose next turn has not arrived, except those in `_kept`, oldest first."""
        self._kept: dict[ContextId, Context] = {}
        """Contexts that clients want to be kept longer than `_idle_seconds`, oldest first."""
        self._by_hash: dict[tuple[bytes, BlockHash], Context] = {}
        """Maps tenants and hashes to contexts. Tenants may send equal prompts."""
        self._without_context: dict[Program, None] = {}
        """Named programs that had no context when their last turn or pause ended, the longest idle
        first. Some of them have begun another turn since.
        """
        self._next_id = 1
        self._num_begun = 0
        self._named = NamedPrograms(self._most)

    @property
    def last_context(self) -> ContextId:
        return ContextId(self._next_id - 1)

    @property
    def num_paused(self) -> int:
        return len(self._paused) + len(self._kept)

    def check(self, request: Request) -> None:
        """Raises InvalidArgument if a request names a parent that was started by its program."""
        program = self._named.find(request)
        if program is not None and _descends(self._named.parent_of(request), program):
            raise InvalidArgument(
                "program.parent_id names a program that this program has started",
                field="program.parent_id",
            )

    def find(self, request: Request) -> tuple[Program | None, Context | None]:
        """The program and the context that a request continues, or None. The request's full blocks
        must be hashed. The context is the longest context of the request's tenant with which the
        request begins.

        If the request names a known program, only contexts of this program are considered. If it
        names an unknown program, contexts of programs without a name are considered. In this case,
        contexts of other names are considered, too, if the request contains them as a whole,
        because the client then seems to give each turn another name. A program with a parent or
        with children is not given another name, because clients refer to it by its own name.
        """
        program, declared = self._named.find(request), request.program
        is_named = declared is not None and bool(declared.id)
        for one in reversed(request.block_hashes):
            context = self._by_hash.get((request.tenant, one))
            if context is None:
                continue
            is_whole = one == context.last_hash
            if not is_whole and request.num_tokens <= context.num_prompt_tokens:
                continue  # not a next turn: the client has sent the turn's prompt again
            theirs = context.program
            is_free = theirs.name is None or (
                is_whole
                and not theirs.num_running
                and not theirs.has_family
                and declared is not None
                and not declared.parent_id
            )
            if not is_named or theirs is program or (program is None and is_free):
                return theirs, context
        return program, None

    def begin(self, request: Request, application: BlockHash | None, now: float) -> Program:
        self._num_begun += 1
        label = f"#{self._num_begun}"
        return Program(application, now, request.tenant, request.tenant_weight, label)

    def add(self, request: Request, program: Program) -> Program | None:
        return self._named.add(request, program)

    def pause(
        self, request: Request, program: Program, now: float, block_size: int
    ) -> tuple[Context, Context | None]:
        """Begins the pause after an ended request that has a published block (cached for prefix
        hits). Returns the context that the request left. If an older context has the same last
        block, ends its pause, and returns it, too.
        """
        hashes, num_in_prompt = request.block_hashes, request.num_prompt_tokens // block_size
        context = Context(
            ContextId(self._next_id),
            program,
            hashes[request.num_committed_blocks - 1],
            request.num_tokens,
            now,
            hashes[num_in_prompt - 1] if 0 < num_in_prompt <= len(hashes) else None,
            request.num_prompt_tokens,
            traceparent=request.traceparent,
        )
        if (turn := request.program_turn) is not None:
            context.num_turns, context.began = turn.num_before + 1, turn.began
        if request.program is not None:
            context.keep_seconds = min(request.program.keep_seconds, MAX_KEEP_SECONDS)
        self._next_id += 1
        tenant, last, prompt = program.tenant, context.last_hash, context.prompt_hash
        same = self._by_hash.get((tenant, last))
        if same is not None and same.last_hash == last:
            self.end_pause(same)
        else:
            same = None
        self._by_hash[tenant, last] = context
        if prompt is not None:
            known = self._by_hash.get((tenant, prompt))
            if known is None or known.last_hash != prompt:
                self._by_hash[tenant, prompt] = context
        of = self._kept if context.keep_seconds > self._idle_seconds else self._paused
        of[context.id] = program.contexts[context.id] = context
        return context, same

    def end_pause(self, context: Context) -> None:
        context.program.contexts.pop(context.id, None)
        self._paused.pop(context.id, None)
        self._kept.pop(context.id, None)
        tenant = context.program.tenant
        for one in (context.last_hash, context.prompt_hash):
            if one is not None and self._by_hash.get((tenant, one)) is context:
                del self._by_hash[tenant, one]

    def idle(self, now: float) -> Iterator[Context]:
        """Yields the contexts whose pause exceeds the limit: `_idle_seconds`, or MAX_KEEP_SECONDS
        if the client wants a longer time. If there are too many contexts, also yields the oldest.
        The caller must end the pause of each yielded context.
        """
        for of, limit in (self._paused, self._idle_seconds), (self._kept, MAX_KEEP_SECONDS):
            while of:
                context = next(iter(of.values()))
                if now - context.paused_at < limit and self.num_paused <= self._most:
                    break
                yield context

    def rest(self, program: Program) -> None:
        """Must be called when a program's turn or pause has ended and left no context."""
        if program.name is not None and not (program.num_running or program.contexts):
            self._without_context.pop(program, None)
            self._without_context[program] = None

    def idle_without_context(self, now: float) -> Iterator[Program]:
        """Yields the programs without contexts whose last turn ended `_idle_seconds` ago. The
        caller must end them.
        """
        while self._without_context:
            program = next(iter(self._without_context))
            is_idle = not (program.has_ended or program.num_running or program.contexts)
            if is_idle and now - program.last_active < self._idle_seconds:
                break
            del self._without_context[program]
            if is_idle:
                yield program

    def end(self, program: Program) -> list[Context]:
        """Ends a program and the pauses of its contexts. Returns the contexts."""
        program.has_ended = True
        self._named.remove(program)
        if program.parent is not None:
            program.parent.num_children -= 1
        contexts = list(program.contexts.values())
        for context in contexts:
            self.end_pause(context)
        return contexts
