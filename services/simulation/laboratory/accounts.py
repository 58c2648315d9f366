"""The measures of a run: job time, time to first token, waste, hit rate, fairness."""

import math
from array import array
from collections import defaultdict
from collections.abc import Sequence

from services.simulation.laboratory.device import Device
from services.simulation.laboratory.live import SentTurn
from services.simulation.laboratory.programs import Program


class Accounts:
    """Collects the measures of programs (jobs, such as agents' runs) and their turns (requests).

    A token is *wasted* if it is computed again for the same program, or for the prefix that all
    programs of an application share. A wasted token is *preempted* if a preemption lost it,
    *evicted* if the replica had computed it for an earlier turn, and *cold* if only other replicas
    had computed it.
    """

    def __init__(self, device: Device, budget: int, block_size: int) -> None:
        self.job_seconds = array("d")
        self.alone_seconds = array("d")
        """For each ended program (job), its time on an idle replica with unlimited memory."""
        self.first_turn_seconds = array("d")
        self.later_turn_seconds = array("d")
        self.wait_seconds = array("d")
        self.num_prompt_tokens = self.num_cached_tokens = self.num_output_tokens = 0
        self.num_preempted_tokens = self.num_evicted_tokens = self.num_cold_tokens = 0
        self.num_reusable_tokens = 0
        """Number of prompt tokens that an unlimited cache, shared by all replicas, would hit."""
        self.context_seconds = 0.0
        """The number of tokens of all unfinished programs so far, integrated over time in seconds.
        The answer of a running request is not counted.
        """
        self.mean_context_tokens = 0.0
        """The number of tokens of unfinished programs, averaged over time to the last arrival."""
        self._speeds: defaultdict[str, list[float]] = defaultdict(list)
        """Maps a tenant to its jobs' speeds: time alone, divided by actual time."""
        self._device = device
        self._budget = budget
        self._block_size = block_size
        self._shared_known: defaultdict[tuple[int, int], set[str]] = defaultdict(set)

    def turn_ended(self, sent: SentTurn, address: str) -> None:
        first = sent.first_token - sent.arrived
        (self.later_turn_seconds if sent.number else self.first_turn_seconds).append(first)
        self.wait_seconds.append(sent.admitted - sent.arrived)
        num_prompt = len(sent.prompt)
        self.num_prompt_tokens += num_prompt
        self.num_cached_tokens += sent.num_cached
        self.num_output_tokens += sent.turn.num_output_tokens
        here, anywhere = self._known(sent, address)
        most = num_prompt - 1
        size = self._block_size
        here, anywhere = min(here, most) // size * size, min(anywhere, most) // size * size
        self.num_reusable_tokens += anywhere
        self.num_evicted_tokens += max(0, here - sent.num_cached)
        self.num_cold_tokens += max(0, anywhere - max(here, sent.num_cached))

    def _known(self, sent: SentTurn, address: str) -> tuple[int, int]:
        """How many prompt tokens the replica at `address` has computed, and the largest such number
        of all replicas.
        """
        live = sent.live
        program = live.program
        holders = self._shared_known[program.application, program.num_shared_tokens]
        shared = program.num_shared_tokens
        here = max(live.known.get(address, 0), shared if address in holders else 0)
        anywhere = max(max(live.known.values(), default=0), shared if holders else 0)
        holders.add(address)
        return here, anywhere

    def program_ended(self, program: Program, began: float, now: float) -> None:
        taken, alone = now - began, self.seconds_alone(program)
        self.job_seconds.append(taken)
        self.alone_seconds.append(alone)
        self._speeds[program.tenant].append(alone / taken if taken else 1.0)

    def seconds_alone(self, program: Program) -> float:
        """The duration of a program that runs alone on a replica with unlimited memory."""
        seconds, context = 0.0, 0
        for number, turn in enumerate(program.turns):
            if turn.runs is not None:
                cached, prompt = 0, sum(length for _, length in turn.runs)
            elif number == 0:
                cached, prompt = 0, program.num_shared_tokens + turn.num_new_tokens
            else:
                cached = context - 1
                if turn.num_kept_tokens is not None:
                    context = max(turn.num_kept_tokens, program.num_shared_tokens)
                    cached = program.num_shared_tokens
                prompt = context + turn.num_new_tokens
            if number:
                seconds += turn.pause_seconds
            output = turn.num_output_tokens
            seconds += self._device.alone_seconds(cached, prompt, output, self._budget)
            seconds += max(map(self.seconds_alone, turn.subagents), default=0.0)
            context = prompt + output
        return seconds

    @property
    def fairness(self) -> float:
        """Jain's index of the tenants' mean speeds. A job's speed is its time alone divided by its
        actual time. The index is 1 if all tenants are slowed down equally.
        """
        speeds = [sum(values) / len(values) for values in self._speeds.values()]
        return jain(speeds)

    @property
    def worst_tenant_speed(self) -> float:
        speeds = [sum(values) / len(values) for values in self._speeds.values()]
        return min(speeds, default=1.0)


def jain(values: Sequence[float]) -> float:
    """Jain's index (sum x)^2 / (n sum x^2): 1 if all values are equal, 1/n if all but one are 0."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least the fraction `share` of the values does not exceed. Returns
    0 if there are no values.
    """
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
