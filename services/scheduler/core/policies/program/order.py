"""The order in which waiting requests are admitted: when their conversations are due, and how often
a request is admitted out of turn.
"""

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.policies.program.ended_programs import EndedPrograms
from services.scheduler.core.policies.programs import Program
from services.scheduler.core.program_turn import ProgramTurn

_CONTINUING_SMOOTHING = 0.01
_LEAST_CONTINUING = 0.005
"""If a smaller fraction of programs continues, requests are admitted as with fcfs."""
_PATIENCE = 2.0
"""A conversation is due after this multiple of the expected time of its remaining turns."""
_PACE_SMOOTHING = 0.002


class DueTimes:
    """Estimates when conversations are due, from recent turns and ended programs."""

    def __init__(self, ended: EndedPrograms) -> None:
        self._ended = ended
        self.continuing = 0.0
        """The fraction of recent turns that continued a program or after which a tool runs."""
        self.turn_seconds = self.turn_tokens = 0.0
        """Means over recent turns: seconds from arrival to end, and tokens that were not cached."""

    def note_turn(self, *, continues: bool) -> None:
        """Records whether a turn continued a program, or that a tool runs after a turn."""
        self.continuing += _CONTINUING_SMOOTHING * (continues - self.continuing)

    def turn_ended(self, seconds: float, num_tokens: int) -> None:
        """Records a turn's time from arrival to end, and the number of its uncached tokens."""
        self.turn_seconds += _PACE_SMOOTHING * (seconds - self.turn_seconds)
        self.turn_tokens += _PACE_SMOOTHING * (num_tokens - self.turn_tokens)

    @property
    def have_later_turns(self) -> bool:
        """Whether programs have more than one turn."""
        return self.continuing >= _LEAST_CONTINUING

    def due(self, program: Program, turn: ProgramTurn, num_lost_tokens: float) -> float:
        """The time when a turn's conversation is due: its beginning, plus `_PATIENCE` times the
        expected time of its remaining turns. The expected time is proportional to the number of
        tokens to compute for these turns, including `num_lost_tokens`, the tokens of the context
        that are no longer cached. If programs have only one turn, a conversation is due when it
        begins, so that requests are ordered by arrival.
        """
        if not (self.have_later_turns and self.turn_tokens):
            return turn.began
        num_tokens = self._ended.expected_tokens(program.application, turn.num_before)
        seconds = (num_tokens + num_lost_tokens) * self.turn_seconds / self.turn_tokens
        return turn.began + _PATIENCE * seconds


class Turns:
    """Counts admissions of cold and warm requests, so that no request waits forever."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.num_cold = 0
        self.num_warm = 0

    def admitted(self, *, is_warm: bool, cold_waits: bool) -> None:
        if is_warm:
            self.num_warm += cold_waits
        else:
            self.num_cold, self.num_warm = self.num_cold + 1, 0

    @property
    def cold_comes_first(self) -> bool:
        """Whether a cold request must be admitted before all other requests."""
        return self.num_warm >= self._config.max_warm_admissions

    @property
    def oldest_comes_first(self) -> bool:
        """Whether the longest waiting cold request precedes the other cold requests."""
        interval = self._config.aging_interval
        return self.num_cold % interval == interval - 1
