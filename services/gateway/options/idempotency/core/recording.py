"""A recording of the output of an engine (all replicas together) for one request, with any number
of readers. The output of each of the request's sequences is appended in deltas.
"""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from services.common.errors import StepwellError
from services.common.request.finish import Finish
from services.gateway.core.request.delta import Delta, Progress
from services.gateway.core.request.logprobs import LogprobRows, joined

_SEQUENCE_BYTES = 1024
"""The approximate memory of a sequence without its tokens, in bytes."""


@dataclass(slots=True)
class Seen:
    """The part of a sequence's output that a reader has received."""

    num_tokens: int = 0
    num_prompt_rows: int = 0
    num_cached_tokens: int | None = None
    finish: Finish | None = None


@dataclass(slots=True)
class SequenceRecord:
    """The whole output of one sequence."""

    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: LogprobRows | None = None
    """One row for each token. It is None if log-probabilities were not requested."""
    prompt_logprobs: LogprobRows | None = None
    num_cached_tokens: int | None = None
    finish: Finish | None = None

    def add(self, delta: Delta) -> None:
        self.token_ids.extend(delta.token_ids)
        self.logprobs = joined(self.logprobs, _copied(delta.logprobs))
        self.prompt_logprobs = joined(self.prompt_logprobs, _copied(delta.prompt_logprobs))
        if delta.num_cached_tokens is not None:
            self.num_cached_tokens = delta.num_cached_tokens
        if self.finish is None:
            self.finish = delta.finish

    def since(self, seen: Seen) -> Delta:
        """Returns the output after `seen`, and updates `seen` to include it."""
        delta = Delta(self.token_ids[seen.num_tokens :].tolist())
        if delta.token_ids and self.logprobs is not None:
            delta.logprobs = self.logprobs.part(seen.num_tokens)
        if self.num_prompt_rows > seen.num_prompt_rows and self.prompt_logprobs is not None:
            delta.prompt_logprobs = self.prompt_logprobs.part(seen.num_prompt_rows)
        if self.num_cached_tokens != seen.num_cached_tokens:
            delta.num_cached_tokens = self.num_cached_tokens
        if self.finish != seen.finish:
            delta.finish = self.finish
        seen.num_tokens = len(self.token_ids)
        seen.num_prompt_rows = self.num_prompt_rows
        seen.num_cached_tokens, seen.finish = self.num_cached_tokens, self.finish
        return delta

    @property
    def num_prompt_rows(self) -> int:
        """The number of recorded rows of prompt log-probabilities."""
        return len(self.prompt_logprobs or ())

    @property
    def num_bytes(self) -> int:
        """The approximate memory of the sequence, in bytes."""
        rows = [rows for rows in (self.logprobs, self.prompt_logprobs) if rows is not None]
        cells = len(self.token_ids) + sum(2 * len(one.token_ids) + len(one) for one in rows)
        return _SEQUENCE_BYTES + 4 * cells


class Cursor:
    """A reader's position in a recording. It starts at the recording's beginning. `on_news` is
    called when there is new output.
    """

    def __init__(
        self, recording: "Recording", on_news: Callable[[], None], *, at_end: bool = False
    ) -> None:
        """If `at_end` is true, the cursor starts after the current output."""
        self._recording = recording
        self._seen = [Seen() for _ in recording.sequences]
        self._changed = set(range(len(self._seen)))
        self._on_news = on_news
        recording.cursors[self] = None
        if at_end:
            self.take()

    def note(self, index: int) -> None:
        """Marks a sequence as having new output."""
        self._changed.add(index)
        self._on_news()

    def wake(self) -> None:
        """Notifies the reader that the recording failed."""
        self._on_news()

    def take(self) -> list[tuple[int, Seen, Delta]]:
        """Returns the output since the last call: for each sequence with new output, the sequence's
        index, how much of it the reader received before, and the new output.
        """
        changed, self._changed = sorted(self._changed), set()
        news = []
        for index in changed:
            seen = self._seen[index]
            before = replace(seen)
            delta = self._recording.sequences[index].since(seen)
            if seen != before:
                news.append((index, before, delta))
        return news

    def close(self) -> None:
        """Stops reading. Idempotent."""
        self._recording.cursors.pop(self, None)


class Recording:
    """The sequences of one request with their output so far. A recording ends when every sequence
    has ended, or with an error.
    """

    def __init__(self, num_sequences: int) -> None:
        self.sequences = [SequenceRecord() for _ in range(num_sequences)]
        self.error: StepwellError | None = None
        self.cursors: dict[Cursor, None] = {}

    @property
    def is_complete(self) -> bool:
        return all(sequence.finish is not None for sequence in self.sequences)

    @property
    def is_over(self) -> bool:
        """Whether the recording has ended, because it is complete or has failed."""
        return self.error is not None or self.is_complete

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    @property
    def num_bytes(self) -> int:
        """The approximate memory of all sequences, in bytes."""
        return sum(sequence.num_bytes for sequence in self.sequences)

    def add(self, deltas: Iterable[tuple[int, Delta]]) -> None:
        """Appends deltas. An error ends the recording."""
        for index, delta in deltas:
            if delta.error is not None:
                self.fail(delta.error)
                return
            self.sequences[index].add(delta)
            for cursor in self.cursors:
                cursor.note(index)

    def fail(self, error: StepwellError) -> None:
        """Ends the recording with an error. Does nothing if the recording has ended."""
        if not self.is_over:
            self.error = error
            for cursor in self.cursors:
                cursor.wake()

    def progress(self) -> list[Progress]:
        """Returns the output of each sequence so far, which an engine needs to resume it."""
        return [
            Progress(one.token_ids.tolist(), one.num_prompt_rows, one.finish is not None)
            for one in self.sequences
        ]


def _copied(rows: LogprobRows | None) -> LogprobRows | None:
    """Copies rows of log-probabilities, because a recording appends to its own rows in place and
    must not share them with the delta, whose rows other code still reads.
    """
    return None if rows is None else rows.part(0)
