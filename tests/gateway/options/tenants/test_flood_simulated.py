"""Measures how long the requests of one tenant wait while another tenant sends too many. The
gateway's real admission runs in simulated time, with a simulated replica.
"""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from statistics import fmean

from services.common.errors import ResourceExhausted
from services.common.request.finish import Finish, FinishReason
from services.gateway.core.request.inflight import Inflight
from services.gateway.options.tenants.core.tenant import Tenant
from tests.gateway.fake_fleet import FakeFleet
from tests.gateway.options.tenants.tenant_fleet import with_queues

FLOODS, QUIET = Tenant("floods"), Tenant("quiet")
NUM_PLACES, NUM_OUTPUT_TOKENS = 32, 128
STEP_SECONDS, DECODE_SECONDS, PROMPT_SECONDS = 0.4e-3, 0.07e-3, 0.9e-3
"""A step takes a constant time, and more for each decoding sequence and for each prompt. A prompt
takes as long as a dozen decoding sequences.
"""
LINK_SECONDS = 1.5e-3
"""The delay of a message from the gateway to the replica or back."""
QUIET_PERIOD_SECONDS, FLOOD_PERIOD_SECONDS = 0.0503, 0.001
BEGIN_SECONDS, RUN_SECONDS = 1.0, 5.0


class SimulatedReplica:
    """A replica with two steps in flight. Each step that is planned after the arrival of a sequence
    computes one token of the sequence.
    """

    def __init__(self) -> None:
        self.world = with_queues(FakeFleet(1))
        self.world.connect("a", max_num_seqs=NUM_PLACES)
        self.clock = self.world.clock
        self.nums_running: list[int] = []
        """The number of sequences in each step."""
        self.on_token: Callable[[Inflight], None] = lambda _: None
        self._waiting: dict[int, Inflight] = {}
        self._num_left: dict[int, int] = {}
        """Maps a running sequence to the number of its tokens that are in no planned step yet."""
        self._steps: deque[tuple[list[int], list[int]]] = deque()
        """For each step in flight: its sequences, and those of them that are new."""
        self._busy_until = 0.0

    def start(self, tenant: Tenant) -> Inflight:
        (inflight,) = self.world.start(max_tokens=NUM_OUTPUT_TOKENS, caller=tenant).inflights
        self._receive()
        return inflight

    def _receive(self) -> None:
        """After LINK_SECONDS, the gateway's new and aborted sequences arrive at the replica."""
        link, later = self.world.links["a"], self.clock.time() + LINK_SECONDS
        for handle, inflight in link.added.items():
            self.clock.call_at(later, partial(self._arrive, handle, inflight))
        for handle in link.aborted:
            self.clock.call_at(later, partial(self._abort, handle))
        link.added.clear()
        link.aborted.clear()

    def _abort(self, handle: int) -> None:
        self._waiting.pop(handle, None)
        self._num_left.pop(handle, None)

    def _arrive(self, handle: int, inflight: Inflight) -> None:
        self._waiting[handle] = inflight
        self._plan()

    def _plan(self) -> None:
        while len(self._steps) < 2:
            new = list(self._waiting)[: NUM_PLACES - len(self._num_left)]
            for handle in new:
                num_had = len(self._waiting.pop(handle).output_token_ids)
                self._num_left[handle] = NUM_OUTPUT_TOKENS - num_had
            handles = list(self._num_left)
            if not handles:
                return
            seconds = STEP_SECONDS + DECODE_SECONDS * (len(handles) - len(new))
            begin = max(self.clock.time(), self._busy_until)
            self._busy_until = begin + seconds + PROMPT_SECONDS * len(new)
            for handle in handles:
                self._num_left[handle] -= 1
                if not self._num_left[handle]:
                    del self._num_left[handle]
            self._steps.append((handles, new))
            self.nums_running.append(len(handles))
            self.clock.call_at(self._busy_until, self._end_step)

    def _end_step(self) -> None:
        step = self._steps.popleft()
        self.clock.call_at(self.clock.time() + LINK_SECONDS, partial(self._deliver, *step))
        self._plan()

    def _deliver(self, handles: list[int], new: list[int]) -> None:
        replica = self.world.replicas["a"]
        for handle in new:
            replica.admitted(handle, 0)
        for handle in handles:
            inflight = replica.running.get(handle)
            if inflight is None:
                continue
            inflight.tokens([1])
            self.on_token(inflight)
            if len(inflight.output_token_ids) == NUM_OUTPUT_TOKENS:
                replica.finished(handle, Finish(FinishReason.LENGTH))
        self._receive()


class Run:
    """The tenant QUIET sends requests at regular intervals, while the tenant FLOODS sends as many
    as the gateway accepts. The first second is not measured.
    """

    def __init__(self) -> None:
        self.replica = SimulatedReplica()
        self.replica.on_token = self._note
        self.first_token_seconds: list[float] = []
        self._sent: dict[int, float] = {}
        self._ask()
        self._flood()
        self.replica.clock.advance(BEGIN_SECONDS)
        self.first_token_seconds.clear()
        self.replica.nums_running.clear()
        self.replica.clock.advance(RUN_SECONDS)

    def _ask(self) -> None:
        clock = self.replica.clock
        self._sent[self.replica.start(QUIET).number] = clock.time()
        clock.call_at(clock.time() + QUIET_PERIOD_SECONDS, self._ask)

    def _flood(self) -> None:
        clock = self.replica.clock
        with suppress(ResourceExhausted):
            while True:
                self.replica.world.fleet.check_room(FLOODS, None)
                self.replica.start(FLOODS)
        clock.call_at(clock.time() + FLOOD_PERIOD_SECONDS, self._flood)

    def _note(self, inflight: Inflight) -> None:
        if len(inflight.output_token_ids) == 1 and inflight.number in self._sent:
            seconds = self.replica.clock.time() - self._sent[inflight.number]
            self.first_token_seconds.append(seconds)


def test_in_a_flood_a_first_token_comes_after_three_steps_with_few_prompts() -> None:
    """A request waits for the rest of the running step, for the step that is already planned, and
    for its own step, which has two more prompts.
    """
    first_token_seconds = Run().first_token_seconds
    steps = 3 * (STEP_SECONDS + NUM_PLACES * DECODE_SECONDS) + 3 * PROMPT_SECONDS
    assert len(first_token_seconds) > 90
    assert max(first_token_seconds) <= 2 * LINK_SECONDS + steps


def test_in_a_flood_nearly_all_slots_are_taken() -> None:
    """One slot is kept free, and another one is free while a sequence starts."""
    assert fmean(Run().replica.nums_running) >= NUM_PLACES - 2
