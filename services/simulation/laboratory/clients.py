"""Simulated clients. Each one sends the turns (requests) of its program, one after the other."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from services.common.errors import InvalidArgument
from services.common.pool.block_hash import hash_full_blocks
from services.common.pool.kv_directory import block_keys
from services.gateway.core.fleet.replica_description import ReplicaDescription
from services.gateway.core.request.inflight import Inflight
from services.gateway.core.request.request import EngineRequest
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.request import Request
from services.simulation.laboratory.accounts import Accounts
from services.simulation.laboratory.clock import EventClock
from services.simulation.laboratory.fleet import SimulatedFleet
from services.simulation.laboratory.live import LiveProgram, SentTurn, sampling_of
from services.simulation.laboratory.optimum import KnownFuturePool
from services.simulation.laboratory.programs import Context, Program, Turn, tokens_of

_MAX_PROGRAMS = 1 << 28


class Applications:
    """The owner of the blocks of all shared prefixes. KnownFuturePool evicts these blocks last,
    because it evicts the owner with the greatest `next_use` first.
    """

    next_use = -1.0


class Clients:
    """Starts programs on time, sends their turns to the fleet, and observes the replicas."""

    def __init__(
        self,
        programs: Iterator[Program],
        clock: EventClock,
        config: SchedulerConfig,
        accounts: Accounts,
        progress: Callable[[], object] = lambda: None,
        *,
        tells_work: bool = False,
    ) -> None:
        """If `tells_work`, a request's priority is the number of tokens that its program must still
        compute.
        """
        self.fleet: SimulatedFleet
        self.live: dict[int, LiveProgram] = {}
        self.sent: dict[str, SentTurn] = {}
        self._programs = programs
        self._clock = clock
        self._config = config
        self._accounts = accounts
        self._progress = progress
        self._tells_work = tells_work
        self._num_contexts = _MAX_PROGRAMS
        self._applications = Applications()

    def begin(self) -> None:
        """Schedules the arrival of the next program. Each arrival schedules the next one."""
        program = next(self._programs, None)
        if program is not None:
            self._clock.call_at(program.arrival_seconds, partial(self._arrive, program))
            return
        for live in self.live.values():
            self._note_context(live)
        if now := self._clock.now:
            self._accounts.mean_context_tokens = self._accounts.context_seconds / now

    def take_sent(self, inflight: Inflight) -> SentTurn:
        sent = self.sent[inflight.request.request_id]
        sent.inflight = inflight
        return sent

    def of_sequence(self, inflight: Inflight, _served: ReplicaDescription) -> Sequence[int]:
        """Returns the keys of a prompt's blocks. Implements the gateway's SequenceKeys."""
        return block_keys(self.sent[inflight.request.request_id].live.context.hashes)

    def note_owners(self, pool: KnownFuturePool, request: Request, sent: SentTurn) -> None:
        """Informs a pool which program will use the blocks of a request again."""
        program = sent.live.program
        num_shared_blocks = program.num_shared_tokens // self._config.block_size
        pool.add(request.key, self._applications, sent.live, num_shared_blocks)

    def _arrive(self, program: Program) -> None:
        self.begin()
        self._start(program, None)

    def _start(self, program: Program, parent: LiveProgram | None) -> None:
        context = Context(program, program.number)
        live = LiveProgram(program, self._clock.now, context, parent)
        self.live[program.number] = live
        self._send(live)

    def _send(self, live: LiveProgram) -> None:
        program, context = live.program, live.context
        turn = program.turns[live.num_turns]
        priority = work(program.turns[live.num_turns :]) if self._tells_work else program.priority
        live.num_turns += 1
        self._note_context(live)
        live.next_use = self._clock.now
        self._extend(live, turn)
        num_tokens = context.num_tokens + turn.num_output_tokens
        if num_tokens > self._config.max_model_len:
            raise InvalidArgument(
                f"program {program.number} has a request of {num_tokens} tokens, but a KV cache of "
                f"{self._config.num_blocks - 1} blocks stores only {self._config.max_model_len}: "
                "give it more blocks"
            )
        prompt = context.prompt() if turn.runs is None else tokens_of(turn.runs)
        if self._config.enable_prefix_caching:
            self._hash(context, turn, prompt)
        sent = SentTurn(
            live,
            turn,
            live.num_turns - 1,
            prompt,
            self._clock.now,
            context.own_token,
            f"{program.number}-{live.num_turns}",
            priority,
        )
        self.sent[sent.request_id] = sent
        request = EngineRequest(
            sent.request_id,
            prompt,
            sampling_of(turn.num_output_tokens),
            priority,
            "",
            0,
            session_id=program.session_id or str(program.number),
        )
        self.fleet.fleet.start([request])

    def _note_context(self, live: LiveProgram) -> None:
        """Adds the context's tokens, times the seconds since the last call, to the accounts."""
        now = self._clock.now
        self._accounts.context_seconds += live.context.num_tokens * (now - live.noted_at)
        live.noted_at = now

    def _extend(self, live: LiveProgram, turn: Turn) -> None:
        program, context = live.program, live.context
        if turn.runs is not None:
            context.num_tokens = sum(length for _, length in turn.runs)
            return
        if not context.num_tokens:
            context.num_tokens = program.num_shared_tokens
        elif turn.num_kept_tokens is not None:
            self._num_contexts += 1
            context.number = self._num_contexts
            context.num_tokens = max(turn.num_kept_tokens, program.num_shared_tokens)
            context.hashes = []
            live.known.clear()
        context.num_tokens += turn.num_new_tokens

    def _hash(self, context: Context, turn: Turn, prompt: list[int]) -> None:
        size = self._config.hash_block_size
        if turn.runs is None:
            context.hash_full_blocks(size)
        else:
            context.hashes = hash_full_blocks(self._config.fingerprint, prompt, size)

    # Methods of `Observer`.

    def admitted(self, sent: SentTurn, request: Request, now: float) -> None:
        sent.admitted = now
        sent.num_cached = request.num_cached_tokens or 0

    def recomputes(self, num_tokens: int) -> None:
        self._accounts.num_preempted_tokens += num_tokens

    def first_token(self, sent: SentTurn, now: float) -> None:
        sent.first_token = now

    def ended(self, sent: SentTurn, request: Request, now: float) -> None:
        live, program, context = sent.live, sent.live.program, sent.live.context
        del self.sent[sent.request_id]
        address = sent.inflight.mailbox.routes[-1].address
        retention = self.fleet.replicas[address].scheduler.retention
        if retention is not None and request.context is not None:
            following = program.turns[live.num_turns :]
            tool = following[0].tool if following else ""
            retention.end_turn(request.context, tool, ends=not following)
        self._accounts.turn_ended(sent, address)
        self._note_context(live)
        context.num_tokens = len(request.token_ids)
        context.hashes = request.block_hashes
        live.known[address] = context.num_tokens - 1
        live.num_subagents = len(sent.turn.subagents)
        for child in sent.turn.subagents:
            self._clock.call_at(now, partial(self._start, child, live))
        if not live.num_subagents:
            self._continue(live)
            return
        following = program.turns[live.num_turns :]
        pause = following[0].pause_seconds if following else float("inf")
        live.next_use = now + pause + max(map(self._accounts.seconds_alone, sent.turn.subagents))

    def _continue(self, live: LiveProgram) -> None:
        """Schedules the program's next turn after the turn's pause, or ends the program."""
        turns, now = live.program.turns, self._clock.now
        if live.num_turns < len(turns):
            live.next_use = now + turns[live.num_turns].pause_seconds
            self._clock.call_at(live.next_use, partial(self._send, live))
            return
        del self.live[live.program.number]
        live.next_use = float("inf")
        parent = live.parent
        if parent is None:
            self._accounts.program_ended(live.program, live.began, now)
            self._progress()
            return
        parent.num_subagents -= 1
        if not parent.num_subagents:
            self._continue(parent)


def work(turns: Sequence[Turn]) -> int:
    """The number of tokens that the turns compute if the tokens of earlier turns are cached."""
    return sum(turn.num_new_tokens + turn.num_output_tokens for turn in turns)
