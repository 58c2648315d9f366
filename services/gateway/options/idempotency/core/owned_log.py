"""Writes the log from which other gateways can read an answer that this gateway generates."""

from collections.abc import Callable

from services.gateway.options.idempotency.core.entries import Begin, Bring, Fail, entry_to_bytes
from services.gateway.options.idempotency.core.journal import Append, Position
from services.gateway.options.idempotency.core.keyed_request import KeyedRequest
from services.gateway.options.idempotency.core.recording import Cursor


class OwnedLog:
    """Writes an answer's recording to the answer's log. Each entry has all output since the
    previous entry. If the write of an entry fails, the entry is written again unchanged, because
    the failed write may have had its effect.
    """

    def __init__(
        self,
        request: KeyedRequest,
        written: Position,
        on_news: Callable[[], None],
        heartbeat_seconds: float,
        *,
        begins: bool,
        has_recording: bool,
    ) -> None:
        """`written` is the position of the log's last entry. Its fence, the number of the log's
        owner, is 0 if the log is empty. If `begins` is true, the next entry is a Begin with the
        next fence. If `has_recording` is true, the log already contains the current recording.
        """
        self.request = request
        self._written = written
        self._on_news = on_news
        self._heartbeat_seconds = heartbeat_seconds
        self._begins = begins
        self._cursor = Cursor(request.recording, on_news, at_end=has_recording)
        self._pending: Append | None = None
        self._is_leaving = False
        self._heartbeat_at = 0.0
        self._has_lease = True

    @property
    def is_done(self) -> bool:
        """Whether all entries are written and the log's lease is released."""
        is_over = self._is_leaving or self.request.recording.is_over
        return is_over and self._pending is None and not self._has_lease

    def leave(self) -> None:
        """Called when this gateway stops generating the answer. `next` then returns a last entry,
        which releases the lease, the right of one gateway to generate the answer.
        """
        self._is_leaving = True
        self._on_news()

    def stay(self) -> None:
        """Reverts `leave`: this gateway continues to generate the answer."""
        self._is_leaving = False
        self._heartbeat_at = 0.0
        self._on_news()

    def restart(self) -> None:
        """Writes the log again, from the Begin entry and with the next fence. Called if the log has
        disappeared from the journal.
        """
        self._cursor.close()
        self._cursor = Cursor(self.request.recording, self._on_news)
        self._begins, self._pending = True, None

    def next(self, now: float) -> Append | None:
        """Returns the entry to write, or None if there is no new output and the lease need not be
        renewed yet.
        """
        if self._pending is None:
            self._pending = self._make(now)
        return self._pending

    def done(self, now: float) -> None:
        """Confirms that the entry last returned by `next` was written."""
        assert self._pending is not None
        self._has_lease = self._pending.keeps_lease
        self._written = self._pending.position
        self._heartbeat_at = now + self._heartbeat_seconds
        self._begins, self._pending = False, None

    def close(self) -> None:
        self._cursor.close()

    def _make(self, now: float) -> Append | None:
        request = self.request
        recording = request.recording
        if self._begins:
            position = self._written.next_fence
            return Append(request.scope, position, start_entry(request), begins=True)
        position, is_last = self._written.next, self._is_leaving or recording.is_over
        parts = self._cursor.take()
        if not parts and not is_last and now < self._heartbeat_at:
            return None
        error = recording.error
        value = entry_to_bytes(Bring(parts) if error is None else Fail(error))
        return Append(request.scope, position, value, keeps_lease=not is_last)


def start_entry(request: KeyedRequest) -> bytes:
    """Returns the Begin entry of a request's answer."""
    num_sequences = len(request.recording.sequences)
    return entry_to_bytes(Begin(request.fingerprint, num_sequences, request.identity))
