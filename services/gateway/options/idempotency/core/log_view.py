"""The state of an answer according to its log, which the gateway that generates it writes."""

from collections.abc import Sequence

from services.gateway.core.request.delta import Delta
from services.gateway.options.idempotency.core.entries import (
    Begin,
    Bring,
    DamagedEntry,
    Fail,
    Part,
    entry_from_bytes,
)
from services.gateway.options.idempotency.core.journal import Position
from services.gateway.options.idempotency.core.recording import Recording, SequenceRecord


class LogView:
    """The recording that results from a log's entries up to `position`. An entry may repeat earlier
    output, for example because another gateway took over the log and generated the output again.
    Repeated output is skipped.
    """

    def __init__(self) -> None:
        self.position = Position()
        self.begin: Begin | None = None
        """The last Begin entry, or None while the log is empty."""
        self.recording = Recording(0)
        """The output after the last Begin entry. If the log gets a Begin entry of another answer,
        this object is replaced.
        """

    @property
    def has_answer(self) -> bool:
        """Whether the log has an answer, complete or in progress, that has not failed."""
        return self.begin is not None and self.recording.error is None

    def apply(self, entries: Sequence[tuple[Position, bytes]]) -> None:
        """Applies new entries of the log. Raises DamagedEntry at the first damaged entry, after all
        earlier entries were applied.
        """
        for position, value in entries:
            if position <= self.position:
                continue
            match entry_from_bytes(value):
                case Begin() as begin:
                    self._begin(begin)
                case Bring(parts):
                    self._bring(parts)
                case Fail(error):
                    self.recording.fail(error)
            self.position = position

    def _begin(self, begin: Begin) -> None:
        if begin != self.begin or not self.has_answer:
            self.begin = begin
            self.recording = Recording(begin.num_sequences)

    def _bring(self, parts: Sequence[Part]) -> None:
        for index, before, delta in parts:
            if index >= len(self.recording.sequences):
                raise DamagedEntry(f"there is no sequence {index}")
            sequence = self.recording.sequences[index]
            num_tokens = len(sequence.token_ids) - before.num_tokens
            num_rows = sequence.num_prompt_rows - before.num_prompt_rows
            if num_tokens < 0 or num_rows < 0:
                raise DamagedEntry(f"tokens of sequence {index} are missing")
            self.recording.add([(index, _rest(delta, num_tokens, num_rows, sequence))])


def _rest(delta: Delta, num_tokens: int, num_rows: int, sequence: SequenceRecord) -> Delta:
    """Returns a delta without its first `num_tokens` tokens and its first `num_rows` rows of prompt
    log-probabilities (a row for each position), which the sequence already has.
    """
    return Delta(
        delta.token_ids[num_tokens:],
        None if delta.logprobs is None else delta.logprobs.part(num_tokens),
        None if delta.prompt_logprobs is None else delta.prompt_logprobs.part(num_rows),
        delta.num_cached_tokens if sequence.num_cached_tokens is None else None,
        delta.finish,
    )
