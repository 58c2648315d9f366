"""Checks arriving requests, and refuses requests that could never be admitted."""

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.errors import InvalidArgument, OutOfRange
from services.common.pool.block_hash import unpack_token_ids
from services.common.pool.ids import RequestKey
from services.common.replica.queue_state import QueueState
from services.common.request.messages import (
    pooling_from_proto,
    program_from_proto,
    prompt_embeds_from_proto,
    sampling_from_proto,
)
from services.common.request.pooling import Pooler, PoolingParams
from services.common.request.program import DeclaredProgram
from services.common.request.prompt_embeds import PromptEmbeds
from services.common.request.sampling import SamplingParams
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.input_chunk import InputChunk
from services.scheduler.core.policies import find_policy
from services.scheduler.core.request import Request

_NO_SAMPLING = SamplingParams()
"""The sampling parameters of requests whose result is a vector."""


@dataclass(frozen=True, slots=True)
class RequestIntake:
    """Checks requests against the limits of the replica, and converts them to `Request`."""

    config: SchedulerConfig
    vocab_size: int
    hidden_size: int
    max_model_len: int
    queue_at_arrival: Callable[[], QueueState]
    next_key: Callable[[], int]
    """Returns a key that no earlier request had."""
    pooler: Pooler | None = None
    """How the model computes a vector from a prompt. None if the model generates tokens."""

    def accept(self, message: scheduler_pb2.AddRequest) -> Request:
        """Converts a message to a request. Raises InvalidArgument or OutOfRange for an invalid
        field, and ResourceExhausted if the queue is full or the expected wait is too long. If the
        prompt is given as embeddings, their digest must still be added to the cache salt.
        """
        latest_start = self._latest_start(message)
        embeds = self._embeds(message)
        prompt = (
            _last_prompts(message.prompt_token_ids, self.vocab_size)
            if embeds is None
            else embeds.placeholders
        )
        pooling = self._pooling(message, len(prompt))
        output = self._tokens(message.output_token_ids, "output_token_ids")
        if not prompt:
            raise InvalidArgument("prompt_token_ids is empty", field="prompt_token_ids")
        self._check_length(len(prompt), len(output))
        sampling = (
            _NO_SAMPLING if pooling is not None else self._sampling(message.sampling, len(output))
        )
        if message.priority and not find_policy(self.config.policy).uses_priority:
            raise InvalidArgument(
                "priority is not 0, but this replica does not schedule by priority",
                field="priority",
            )
        self._check_adapter(message)
        return Request(
            request_id=message.request_id,
            key=RequestKey(self.next_key()),
            token_ids=[*prompt, *output],
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            priority=message.priority,
            arrival_time=message.arrival_unix_nanos / 1e9,
            latest_start=latest_start,
            cache_salt=message.cache_salt,
            prompt_embeds=embeds,
            adapter_digest=message.adapter.digest,
            adapter_name=message.adapter.name,
            traceparent=message.traceparent,
            tracestate=message.tracestate,
            baggage=message.baggage,
            queued_unix_nanos=time.time_ns(),
            num_choices=message.num_choices,
            program=self._program(message),
            tenant=message.tenant,
            tenant_weight=self._tenant_weight(message),
            tenant_max_retained_share=self._max_retained_share(message),
            pooling=pooling,
            reads_prefix_cache=self._may_read_prefix_cache(sampling)
            and not message.skip_reading_prefix_cache,
        )

    def accept_chunk(self, session: Request, message: scheduler_pb2.AddChunk) -> InputChunk:
        """Converts a message to a session's next input. Raises InvalidArgument or OutOfRange."""
        tokens = self._tokens(message.token_ids, "token_ids")
        if not tokens:
            raise InvalidArgument("token_ids is empty", field="token_ids")
        self._check_length(session.num_tokens + len(tokens), 0)
        return InputChunk(
            token_ids=tokens,
            sampling=self._sampling(message.sampling, 0),
            arrival_time=message.arrival_unix_nanos / 1e9 or time.time(),
            request_id=message.request_id,
            traceparent=message.traceparent,
            tracestate=message.tracestate,
            baggage=message.baggage,
            queued_unix_nanos=time.time_ns(),
        )

    def _may_read_prefix_cache(self, sampling: SamplingParams) -> bool:
        if self.pooler is not None:
            return self.pooler.reads_prefix_cache
        return sampling.prompt_logprobs is None

    def _check_adapter(self, message: scheduler_pb2.AddRequest) -> None:
        """Raises InvalidArgument if the replica serves no adapters, or if the digest is invalid."""
        if not message.HasField("adapter"):
            return
        digest = message.adapter.digest
        if self.config.max_loras is None:
            raise InvalidArgument(
                "adapter is set, but this replica serves no adapters", field="adapter"
            )
        if len(digest) != hashlib.sha256().digest_size:
            raise InvalidArgument(
                f"adapter.digest has {len(digest)} bytes; a SHA-256 has 32", field="adapter"
            )

    def _pooling(self, message: scheduler_pb2.AddRequest, num_tokens: int) -> PoolingParams | None:
        """How a vector is computed from the prompt. None if the model generates tokens. Raises
        InvalidArgument if the request is for the other kind of model.
        """
        if message.HasField("pooling") != (self.pooler is not None):
            raise InvalidArgument(
                "pooling is set, but this model generates tokens and does not compute vectors of "
                "prompts"
                if self.pooler is None
                else "this model computes vectors of prompts and generates no tokens",
                field="pooling",
                reason="OTHER_RUNNER",
            )
        if self.pooler is None:
            return None
        if message.output_token_ids:
            raise InvalidArgument(
                "output_token_ids: must be empty, because a pooling request has no output",
                field="output_token_ids",
            )
        if message.HasField("prompt_embeds") and self.pooler.takes_whole_prompts:
            raise InvalidArgument(
                "prompt_embeds: this model accepts only prompts of tokens", field="prompt_embeds"
            )
        params = pooling_from_proto(message.pooling)
        self.pooler.check(params, num_tokens)
        return params

    def _program(self, message: scheduler_pb2.AddRequest) -> DeclaredProgram | None:
        """The agent's program that the client names. Raises InvalidArgument if it is invalid."""
        if not message.HasField("program"):
            return None
        program = program_from_proto(message.program)
        program.check()
        return program

    def _tenant_weight(self, message: scheduler_pb2.AddRequest) -> float:
        weight = message.tenant_weight or 1.0
        if not 0 < weight < math.inf:
            raise InvalidArgument("tenant_weight must be above 0", field="tenant_weight")
        return weight

    def _max_retained_share(self, message: scheduler_pb2.AddRequest) -> float:
        share = message.tenant_max_retained_share or 1.0
        if not 0 < share <= 1:
            field = "tenant_max_retained_share"
            raise InvalidArgument(f"{field} must be above 0, at most 1", field=field)
        return share

    def _latest_start(self, message: scheduler_pb2.AddRequest) -> float | None:
        """The latest time of the request's admission, or None. Raises ResourceExhausted if the
        queue is full, or if the admission is expected later than this time.
        """
        queue, has_output = self.queue_at_arrival(), bool(message.output_token_ids)
        timeout = message.timeout_millis / 1000 if message.timeout_millis else None
        longest = queue.longest_wait(timeout, has_output=has_output)
        refusal = queue.refusal_within(longest)
        if refusal is not None:
            raise refusal
        return None if longest is None else time.monotonic() + longest

    def _embeds(self, message: scheduler_pb2.AddRequest) -> PromptEmbeds | None:
        if not message.HasField("prompt_embeds"):
            return None
        for name, is_given in (
            ("prompt_token_ids", bool(message.prompt_token_ids)),
            ("sampling.prompt_logprobs", message.sampling.HasField("prompt_logprobs")),
        ):
            if is_given:
                raise InvalidArgument(
                    f"{name}: must be empty, because the prompt is given as embeddings "
                    "(prompt_embeds)",
                    field=name,
                )
        embeds = prompt_embeds_from_proto(message.prompt_embeds)
        embeds.check(self.hidden_size)
        return embeds

    def _tokens(self, packed: bytes, field: str) -> list[int]:
        return _checked_tokens(packed, self.vocab_size, field)

    def _check_length(self, num_prompt: int, num_output: int) -> None:
        total = num_prompt + num_output
        num_free = 0 if self.config.pooling else 1
        room = ", of which at least one must be generated" if num_free else ""
        field = "output_token_ids" if num_output else "prompt_token_ids"
        if total > self.max_model_len - num_free:
            raise OutOfRange(
                f"This model's maximum context length is {self.max_model_len} tokens{room}: the "
                f"request has {total} tokens",
                field=field,
                reason="LONGER_THAN_MODEL",
            )
        if total > self.config.max_prompt_len:
            raise OutOfRange(
                f"This model's maximum context length is {self.config.max_model_len} tokens{room}, "
                "because the KV cache cannot store a longer request: the request has "
                f"{total} tokens",
                field=field,
                reason="LARGER_THAN_POOL",
            )

    def _sampling(self, message: common_pb2.SamplingParams, num_output: int) -> SamplingParams:
        for name in ("seed", "max_tokens"):
            if not message.HasField(name):
                raise InvalidArgument(f"sampling.{name} is not set", field=f"sampling.{name}")
        if message.max_tokens <= num_output:
            raise InvalidArgument(
                f"sampling.max_tokens is {message.max_tokens}, "
                f"but the output has {num_output} tokens already",
                field="sampling.max_tokens",
            )
        sampling = sampling_from_proto(message)
        try:
            sampling.validate(self.vocab_size)
        except InvalidArgument as error:
            raise InvalidArgument(error.message, field=f"sampling.{error.field}") from error
        return sampling


def _checked_tokens(packed: bytes, vocab_size: int, field: str) -> list[int]:
    try:
        token_ids = unpack_token_ids(packed)
    except ValueError as error:
        raise InvalidArgument(f"{field} is not an array of int32", field=field) from error
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise InvalidArgument(
            f"{field} contains {wrong}, which is not a token from 0 to {vocab_size - 1}",
            field=field,
        )
    return token_ids


@lru_cache(maxsize=4)
def _last_prompts(packed: bytes, vocab_size: int) -> tuple[int, ...]:
    """Unpacks and checks a prompt. The last results are cached, because the answers of one request
    (`n`) have the same prompt. Their lists of tokens then share the numbers, which need four times
    as much memory as the lists.
    """
    return tuple(_checked_tokens(packed, vocab_size, "prompt_token_ids"))
