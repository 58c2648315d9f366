"""Applies the outputs of steps: appends tokens, ends requests, and ends turns of sessions (requests
with several turns).
"""

from collections.abc import Mapping, Sequence

from services.common.request.finish import CLIENT_ERRORS, FinishReason
from services.common.request.structured_outputs import FIELD
from services.scheduler.core.kv_transfer import KVLoadFailurePolicy
from services.scheduler.core.output import EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.planning.replica_state import ReplicaState
from services.scheduler.core.planning.transfers import Transfers
from services.scheduler.core.request import Request, TurnEnd

_FAILURES = {FinishReason.NAN_IN_LOGITS, FinishReason.ERROR, *CLIENT_ERRORS}
"""If a session's turn ends for one of these reasons, the session ends, too."""


class StepUpdate:
    def __init__(self, state: ReplicaState) -> None:
        self._state = state
        self._config = state.config
        self._running = state.running

    def update(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> EngineCoreOutputs:
        """See `Scheduler.update_from_output`."""
        state = self._state
        state.steps.updated(plan)
        transfers = state.transfers
        failed = [] if transfers is None else self._failed_loads(transfers, plan, output)
        if state.pause_mode is not None or output.nan_requests or output.refused_tokens:
            self._take_off_fast_path(plan, output)
        for request in plan.dropped:
            self._running.leave_fast_path(request)
        computed = self._computed_inputs(plan) if state.encoder_cache.used_inputs else {}
        taken: list[Sequence[int] | None] = list(output.token_ids)
        num_tokens, ended, turns = self._append(plan, output, taken)
        for request, num_computed_tokens in computed.items():
            state.encoder_cache.free_computed(request, num_computed_tokens)
            if request in ended:
                state.encoder_cache.free(request)
        for request in ended:
            state.remove(request)
        unable = self._take_failed()
        failures = self._end_in_order(unable, failed) if unable or failed else []
        if transfers is not None:
            transfers.finished(output.kv_transfers, state.steps.in_flight)
        return EngineCoreOutputs(
            plan,
            taken,
            output.logprobs,
            [*ended, *failures],
            num_tokens,
            turns,
            output.execute_nanos,
            output.pooled,
            [request for request in failures if request in unable],
            output.num_draft_tokens,
        )

    def _append(
        self, plan: SchedulerOutput, output: ModelRunnerOutput, taken: list[Sequence[int] | None]
    ) -> tuple[int, list[Request], dict[Request, TurnEnd]]:
        """Appends the sampled tokens to the requests. Sets each request's entry in `taken` to the
        appended tokens, or to None if the tokens are discarded. Returns the number of appended
        tokens, the requests that end, and the sessions whose turn ends.
        """
        ended: list[Request] = []
        turns: dict[Request, TurnEnd] = {}
        num_tokens = len(taken)  # one each; corrected below for requests off the fast path
        indexes = range(len(taken))
        for index, request, tokens in zip(indexes, plan.requests, output.token_ids, strict=True):
            if tokens and request.is_on_fast_path:
                token_id = tokens[0]
                if token_id not in request.ending_token_ids:
                    request.token_ids.append(token_id)
                    continue
            kept = taken[index] = self._kept(plan, output, index)
            num_tokens += len(kept or ()) - 1
            if kept is not None and request.finish_reason is not None:
                if not request.resumable or request.finish_reason in _FAILURES:
                    ended.append(request)
                elif request.chunks and request.chunks[0] is None:
                    request.forget_ahead()
                    ended.append(request)
                else:
                    turns[request] = self._finish_turn(request)
        return num_tokens, ended, turns

    def _kept(
        self, plan: SchedulerOutput, output: ModelRunnerOutput, index: int
    ) -> Sequence[int] | None:
        """Appends the tokens of a request that may end or is off the fast path. Returns the
        appended tokens, or None if the tokens are discarded because the request had already ended
        or is in `plan.dropped`. In the latter case, the request's next step still verifies the
        drafts of this step, as in vLLM (recording `drafts_after_a_dropped_token`), unless a chunk
        of its prompt is computed again meanwhile.
        """
        request, tokens = plan.requests[index], output.token_ids[index]
        if request.finish_reason is not None:
            return None
        if request in plan.dropped:
            if output.draft_token_ids and not request.is_prefill_chunk:
                self._take_drafts(request, output, index)
            return None
        if index in output.nan_requests:
            _discount_drafts(plan, request, num_kept=0)
            request.finish(FinishReason.NAN_IN_LOGITS)
            return ()
        if tokens or index in output.refused_tokens:
            return self._update_request_with_output(plan, output, index)
        if index in output.pooled:
            request.finish(FinishReason.STOP)
        return tokens

    def end_failed(self) -> list[Request]:
        """Ends waiting requests that can never be admitted. Returns them in order of arrival."""
        return self._end_in_order(self._take_failed())

    def _take_failed(self) -> dict[Request, str]:
        """Returns the waiting requests that can never be admitted, with their error messages."""
        if not self._state.failed:
            return {}
        failed, self._state.failed = self._state.failed, {}
        return {request: why for request, why in failed.items() if not request.is_finished}

    def _end_in_order(
        self, unable: Mapping[Request, str], failed_loads: Sequence[Request] = ()
    ) -> list[Request]:
        """Ends requests that can never be admitted, and requests whose KV load has failed. Returns
        all of them in order of arrival.
        """
        ended = sorted({*unable, *failed_loads}, key=lambda request: request.key)
        for request in ended:
            if request in unable:
                request.fail(unable[request], request.error_reason)
            else:
                request.finish(FinishReason.KV_LOAD_FAILED)
            self._state.remove(request)
        return ended

    def _failed_loads(
        self, transfers: Transfers, plan: SchedulerOutput, output: ModelRunnerOutput
    ) -> list[Request]:
        """Discards the tokens that this step and the steps in flight sampled after they read blocks
        whose KV load has failed. Returns the requests that end for this reason, in the order of
        arrival. With the load-failure policy RECOMPUTE, none ends.
        """
        steps = self._state.steps
        affected = transfers.take_failures(
            plan, output.kv_transfers, steps.in_flight, self._state.queues.kv_waiting, self._running
        )
        plan.dropped |= affected
        steps.drop(affected)
        if self._config.kv_load_failure_policy is KVLoadFailurePolicy.RECOMPUTE:
            return []
        return sorted(affected, key=lambda request: request.key)

    def _take_off_fast_path(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Removes requests with NaN logits or refused tokens from the fast path (see
        `RunningRequests`). During a pause, also removes requests that should have left the fast
        path by now, because no step is planned, which would remove them.
        """
        if self._state.pause_mode is not None:
            self._running.take_due_off_fast_path()
        for index in (*output.nan_requests, *output.refused_tokens):
            self._running.leave_fast_path(plan.requests[index])

    def _computed_inputs(self, plan: SchedulerOutput) -> dict[Request, int]:
        """Maps each request of the step that uses encoder outputs to its number of computed tokens.
        With asynchronous scheduling, tokens that steps in flight sample do not count, because
        drafts among them may be rejected. Requests in `plan.dropped` are left out, so that their
        encoder outputs stay in use.
        """
        used_inputs = self._state.encoder_cache.used_inputs
        samples_ahead = self._config.async_scheduling and not self._config.pooling
        return {
            request: request.num_computed_tokens - samples_ahead * request.num_output_placeholders
            for request in plan.requests
            if request in used_inputs and request not in plan.dropped
        }

    def _update_request_with_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput, index: int
    ) -> Sequence[int]:
        request = plan.requests[index]
        kept = request.append_output_token_ids(output.token_ids[index])
        if index in output.refused_tokens:
            _end_if_refused(request, output, index, len(kept))
        _discount_drafts(plan, request, len(kept))
        if output.draft_token_ids:
            self._take_drafts(request, output, index)
        if request.row is not None:
            # All tokens but the last are computed. The last was only sampled.
            self._state.kv_cache_manager.publish(request, len(request.token_ids) - 1)
        return kept

    def _take_drafts(self, request: Request, output: ModelRunnerOutput, index: int) -> None:
        """Stores the drafts that the request's next step verifies. With asynchronous scheduling,
        does nothing, because placeholders were stored when this step was planned.
        """
        if not self._config.async_scheduling:
            num_drafts = self._config.num_drafts(len(self._running))
            request.draft_token_ids = list(output.draft_token_ids[index][:num_drafts])

    def _finish_turn(self, session: Request) -> TurnEnd:
        """Ends the turn of a session, and begins the next turn if its input has arrived.

        Tokens that steps in flight sample for the session are discarded, because they follow the
        end of the turn. For a model with state-space layers, these steps overwrite the session's
        state. With drafts, only the workers know after which token the state is. In these cases the
        session's blocks are freed, and the next turn begins with a prefix hit.
        """
        state = self._state
        is_in_flight = any(session in plan.requests for plan in state.steps.in_flight)
        state.steps.drop([session])
        state.take_out(session)
        end = session.finish_turn(self._config.hash_block_size)
        is_lost = is_in_flight or self._config.num_speculative_tokens
        if is_lost and self._config.holds_states:
            state.free(session)
        state.rows.free(session)
        if session.chunks and (chunk := session.chunks.popleft()) is not None:
            session.begin_turn(chunk, self._config.max_model_len)
        state.queues.add(session)
        return end


def _discount_drafts(plan: SchedulerOutput, request: Request, num_kept: int) -> None:
    """Subtracts rejected drafts, and drafts after the request's end, from the computed tokens."""
    if plan.draft_token_ids and request.num_computed_tokens:
        drafts = plan.draft_token_ids.get(request, ())
        request.num_computed_tokens -= len(drafts) + 1 - num_kept if drafts else 0


def _end_if_refused(request: Request, output: ModelRunnerOutput, index: int, num_kept: int) -> None:
    """Ends a request whose grammar refused a token of the step, unless the request ended before the
    refused token. `num_kept` is the number of the step's tokens that were appended to the request.
    """
    first = output.refused_tokens[index]
    if first > num_kept or (first == num_kept and request.finish_reason is not None):
        return
    after = f"after {request.num_output_tokens - num_kept + first} tokens of this answer"
    error = output.grammar_errors.get(index)
    if error is None:
        request.fail(
            f"{FIELD}: no token of the vocabulary conforms to the grammar {after}",
            FinishReason.NO_CONFORMING_TOKEN,
        )
    else:
        why = f"the grammar cannot be continued {after}: {error}"
        request.fail(f"{FIELD}: {why}", FinishReason.GRAMMAR_ERROR)
