"""Checks the results of steps in a scheduler's messages, and delivers them to the sequences."""

from collections.abc import Sequence
from typing import NamedTuple

from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.recent import Recent
from services.common.replica.messages import queue_state_from_proto, replica_load_from_proto
from services.gateway.adapters.schedulers.converters import (
    finish_from_proto,
    is_rejection_known,
    logprobs_from_proto,
    rejection_from_proto,
    times_from_proto,
    turn_end_from_proto,
)
from services.gateway.adapters.schedulers.session.reports import check_load, check_queue
from services.gateway.adapters.schedulers.session.rows import check_rows, check_vector
from services.gateway.adapters.schedulers.session.sent import Sent
from services.gateway.adapters.schedulers.session.steady import SteadySteps
from services.gateway.adapters.schedulers.session.wrong_message import WrongMessage, require
from services.gateway.core.fleet.replica import Replica
from services.gateway.core.request.inflight import Inflight
from services.gateway.core.request.model_limits import ModelLimits

_MAX_CROSSED = 1024


class _Abort(NamedTuple):
    sent_at: float
    was_stopped: bool


class SessionDeltas:
    """Keeps the sequences of one session (a gRPC stream) with a scheduler, and delivers their
    results. In the session a number, called a handle, identifies a sequence. A message is delivered
    only if all of it is valid.

    A client's session is something else: a series of requests (turns) that continue one sequence.
    """

    def __init__(self, replica: Replica, limits: ModelLimits) -> None:
        self._replica = replica
        self._limits = limits
        self._sent: dict[int, Sent] = {}
        self._aborted: dict[int, _Abort] = {}
        """Maps the handles of aborted sequences to their aborts, the oldest first, until the
        scheduler reports the end of the sequence.
        """
        self._crossed: Recent[int, None] = Recent(_MAX_CROSSED)
        """Handles of clients' sessions that the scheduler has ended. It rejects a turn that the
        gateway sent before it learned of the end.
        """
        self._step = self._num_ended = 0
        self._steady: SteadySteps | None = None

    def sent(self, handle: int, inflight: Inflight) -> None:
        """Records that a sequence, or the next turn of a client's session, was sent."""
        self._sent[handle] = Sent(inflight, continues=handle in self._sent)
        self._crossed.pop(handle, None)
        self._steady = None

    def unsent(self, handle: int) -> None:
        """Forgets a sequence that could not be sent."""
        self._sent.pop(handle, None)
        self._aborted.pop(handle, None)

    def aborted(self, handle: int, now: float, *, was_stopped: bool = False) -> None:
        """Records that a sequence or a client's session was aborted. Only its end is still
        delivered. `was_stopped` is true if a stop string ended the sequence.
        """
        if (sent := self._sent.get(handle)) is not None:
            sent.is_leaving = True
            self._steady = None
            self._aborted[handle] = _Abort(now, was_stopped)

    def unanswered_aborts(self, latest: float) -> dict[int, bool]:
        """Removes and returns the aborts that were sent at `latest` or earlier and whose sequences
        have not ended, as a map from handles to the argument `was_stopped` of `aborted`.
        """
        found: dict[int, bool] = {}
        for handle, abort in self._aborted.items():
            if abort.sent_at > latest:
                break
            found[handle] = abort.was_stopped
        for handle in found:
            del self._aborted[handle]
        return found

    def take(self, deltas: scheduler_pb2.StepDeltas) -> None:
        """Checks and delivers a message. Raises WrongMessage if it is invalid."""
        handles, counts, token_ids = (
            list(deltas.handles),
            list(deltas.num_tokens),
            list(deltas.token_ids),
        )
        is_steady = self._check_tokens(deltas, handles, counts, token_ids)
        if deltas.HasField("queue"):
            check_queue(deltas.queue)
        if deltas.HasField("load"):
            check_load(deltas.load)
        self._pass_on(deltas, handles, counts, token_ids, is_steady=is_steady)

    def _of(self, handle: int) -> Sent:
        sent = self._sent.get(handle)
        if sent is None:
            raise WrongMessage(f"no request has handle {handle}")
        return sent

    def _check_numbers(
        self, deltas: scheduler_pb2.StepDeltas, counts: list[int], token_ids: list[int]
    ) -> None:
        if sum(counts) != len(token_ids):
            raise WrongMessage(
                f"a step has {len(token_ids)} tokens, but the counts add up to {sum(counts)}"
            )
        if token_ids and max(token_ids) >= self._limits.vocab_size:
            raise WrongMessage(
                f"token {max(token_ids)} is not in the vocabulary of {self._limits.vocab_size}"
            )
        if deltas.step < self._step:
            raise WrongMessage(f"step {deltas.step} follows step {self._step}")
        num_ended = self._num_ended + len(deltas.finished) + len(deltas.rejected)
        if deltas.num_ended != num_ended:
            raise WrongMessage(
                f"num_ended is {deltas.num_ended}, but {num_ended} requests have ended"
            )

    def _check_tokens(
        self,
        deltas: scheduler_pb2.StepDeltas,
        handles: list[int],
        counts: list[int],
        token_ids: list[int],
    ) -> bool:
        """Checks all parts of a message except queue state and load. Returns True if the fast check
        of `SteadySteps` sufficed, because the message contains only tokens.
        """
        self._check_numbers(deltas, counts, token_ids)
        totals = list(deltas.num_output_tokens)
        has_ends = bool(deltas.finished or deltas.turns or deltas.rejected)
        steady = None if has_ends else self._steady
        if steady is not None and steady.take(deltas, handles, counts, token_ids, totals):
            return True
        if not len(handles) == len(counts) == len(totals) == len(set(handles)):
            raise WrongMessage(
                f"a step has {len(handles)} handles, {len(set(handles))} of them different, "
                f"{len(counts)} counts and {len(totals)} sums of tokens"
            )
        for admitted in deltas.admitted:
            self._of(admitted.handle).check_admitted(admitted.num_cached_tokens)
            self._sent[admitted.handle].is_admitted = True
        ended = self._ended(deltas) if has_ends else frozenset()
        new: dict[int, list[int]] = {}
        start = 0
        for handle, count, total in zip(handles, counts, totals, strict=True):
            sent = self._sent.get(handle) or self._of(handle)
            if not sent.is_leaving:
                tokens = token_ids[start : start + count]
                has_ended = handle in ended
                sent.check_tokens(tokens, total, has_ended=has_ended)
                if has_ended or sent.wants_rows or sent.num_prompt_rows_wanted:
                    new[handle] = tokens
            start += count
        if new or deltas.logprobs:
            self._check_rows(deltas, new)
        if has_ends or deltas.pooled:
            self._check_vectors(deltas)
        for end in (*deltas.finished, *deltas.turns):
            self._of(end.handle).check_end(end, new.get(end.handle, []), self._limits)
        self._steady = None if has_ends else SteadySteps.after(handles, totals, self._sent)
        return False

    def _ended(self, deltas: scheduler_pb2.StepDeltas) -> frozenset[int]:
        ends = [end.handle for end in (*deltas.finished, *deltas.turns)]
        for rejected in deltas.rejected:
            if self._is_late(rejected, ends):
                continue
            ends.append(rejected.handle)
            self._of(rejected.handle)
            require(is_rejection_known(rejected), f"a rejection has code {rejected.code}")
        require(len(ends) == len(set(ends)), "a request ends twice")
        for turn in deltas.turns:
            sent = self._of(turn.handle)
            is_turn = sent.inflight.request.turn is not None and not sent.is_between_turns
            require(is_turn, "the end of a turn is reported for a request without a turn")
        return frozenset(ends)

    def _check_rows(self, deltas: scheduler_pb2.StepDeltas, new: dict[int, list[int]]) -> None:
        """Checks the log-probabilities of new tokens and of prompts. All rows of a prompt must have
        arrived when the first output token arrives.
        """
        vocab_size = self._limits.vocab_size
        rows: dict[int, int] = {}
        for message in deltas.logprobs:
            sent = self._of(message.handle)
            if sent.is_leaving:
                continue
            if message.prompt.ranks:
                sent.check_prompt_rows(message.prompt, vocab_size)
                sent.num_prompt_rows += len(message.prompt.ranks)
            if message.HasField("sampled") and (num_rows := len(message.sampled.ranks)):
                num_top = sent.inflight.request.sampling.logprobs
                require(
                    num_top is not None, "log-probabilities are sent for a request that wants none"
                )
                start = rows.get(message.handle, 0)
                tokens = new.get(message.handle, [])[start : start + num_rows]
                check_rows(message.sampled, tokens, num_top or 0, vocab_size)
                rows[message.handle] = start + num_rows
        for handle, tokens in new.items():
            sent = self._sent[handle]
            if sent.wants_rows and rows.get(handle, 0) != len(tokens):
                raise WrongMessage(
                    f"{len(tokens)} tokens have {rows.get(handle, 0)} rows of log-probabilities"
                )
            if sent.num_prompt_rows != sent.num_prompt_rows_wanted and tokens:
                raise WrongMessage(
                    f"a prompt has {sent.num_prompt_rows} rows of log-probabilities at its first "
                    f"output token, not {sent.num_prompt_rows_wanted}"
                )

    def _check_vectors(self, deltas: scheduler_pb2.StepDeltas) -> None:
        pooler = self._limits.pooler
        vectors = [pooled.handle for pooled in deltas.pooled]
        require(len(vectors) == len(set(vectors)), "a prompt has two vectors")
        for pooled in deltas.pooled:
            params = self._of(pooled.handle).inflight.request.pooling
            require(
                params is not None and pooler is not None,
                "a vector is sent for a request that wants none",
            )
            assert params is not None
            assert pooler is not None
            check_vector(pooled.values, params.dimensions or pooler.size)
        for end in deltas.finished if pooler is not None else ():
            sent = self._of(end.handle)
            is_whole = end.reason != common_pb2.FINISH_REASON_STOP or end.handle in vectors
            require(sent.is_leaving or is_whole, "a prompt ended without its vector")

    def _pass_on(
        self,
        deltas: scheduler_pb2.StepDeltas,
        handles: Sequence[int],
        counts: Sequence[int],
        token_ids: list[int],
        *,
        is_steady: bool,
    ) -> None:
        replica, running = self._replica, self._replica.running
        self._step, self._num_ended = deltas.step, deltas.num_ended
        # `queue` is the state before the step: requests that the step admitted still count as
        # waiting.
        if deltas.HasField("queue"):
            replica.queue_changed(queue_state_from_proto(deltas.queue))
        if not is_steady:
            for admitted in deltas.admitted:
                replica.admitted(admitted.handle, admitted.num_cached_tokens)
        start = 0
        for handle, count in zip(handles, counts, strict=True):
            if (inflight := running.get(handle)) is not None:
                inflight.tokens(token_ids[start : start + count])
            start += count
        if not is_steady:
            self._pass_on_rows(deltas)
            self._pass_on_ends(deltas)
        if deltas.HasField("load"):
            replica.load_changed(replica_load_from_proto(deltas.load))

    def _pass_on_rows(self, deltas: scheduler_pb2.StepDeltas) -> None:
        running = self._replica.running
        for message in deltas.logprobs:
            if (inflight := running.get(message.handle)) is not None:
                if len(message.sampled.ranks):
                    inflight.logprobs(logprobs_from_proto(message.sampled))
                if len(message.prompt.ranks):
                    inflight.prompt_logprobs(logprobs_from_proto(message.prompt))
        for pooled in deltas.pooled:
            if (inflight := running.get(pooled.handle)) is not None:
                inflight.pooled(pooled.values)

    def _pass_on_ends(self, deltas: scheduler_pb2.StepDeltas) -> None:
        replica, running = self._replica, self._replica.running
        for finished in (*deltas.finished, *deltas.turns):
            if finished.HasField("times") and (inflight := running.get(finished.handle)):
                inflight.trace.times = times_from_proto(finished.times)
        for finished in deltas.finished:
            self._note_crossing(finished.handle)
            self._remove(finished.handle)
            replica.finished(finished.handle, finish_from_proto(finished))
        for turn in deltas.turns:
            sent = self._sent[turn.handle]
            sent.is_between_turns, sent.is_admitted = True, False
            replica.turn_ended(turn.handle, turn_end_from_proto(turn))
        for rejected in deltas.rejected:
            if rejected.handle not in self._sent:
                del self._crossed[rejected.handle]
                continue
            self._note_crossing(rejected.handle)
            self._remove(rejected.handle)
            replica.rejected(rejected.handle, rejection_from_proto(rejected))

    def _is_late(self, rejected: scheduler_pb2.Rejection, ends: Sequence[int]) -> bool:
        """Whether a rejection concerns a turn of a client's session that the scheduler ended
        before, or ends in the same message (`ends`).
        """
        sent = self._sent.get(rejected.handle)
        if sent is None:
            return rejected.handle in self._crossed
        return rejected.handle in ends and sent.continues and not sent.is_admitted

    def _note_crossing(self, handle: int) -> None:
        sent = self._sent[handle]
        if sent.continues and not (sent.is_admitted or sent.is_between_turns):
            self._crossed[handle] = None

    def _remove(self, handle: int) -> None:
        del self._sent[handle]
        self._aborted.pop(handle, None)
