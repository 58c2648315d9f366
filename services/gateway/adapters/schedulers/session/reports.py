"""Checks a scheduler's reports about its model, its queue and its load."""

from stepwell.scheduler.v1 import scheduler_pb2

from services.common.pool.block_hash import HASH_BYTES
from services.gateway.adapters.schedulers.session.wrong_message import WrongMessage, require

_LONGEST_SECONDS = 1e9
_MOST_TOKENS = 2**31 - 1


def check_opened(opened: scheduler_pb2.SessionOpened) -> None:
    """Raises WrongMessage if the model's description has an impossible value."""
    lengths = opened.max_model_len, opened.max_request_tokens, opened.vocab_size
    is_sane = all(0 < length <= _MOST_TOKENS for length in lengths) and opened.block_size > 0
    require(
        is_sane,
        f"a model with (max_model_len, max_request_tokens, vocab_size) {lengths} and block_size "
        f"{opened.block_size} is impossible",
    )
    require(
        len(opened.fingerprint) == HASH_BYTES, "the fingerprint of a model does not have 32 bytes"
    )
    tokenizer = len(opened.tokenizer_fingerprint)
    require(
        tokenizer in (0, HASH_BYTES),
        f"the fingerprint of a tokenizer has {tokenizer} bytes, not 32",
    )
    is_known = all(token_id < opened.vocab_size for token_id in opened.eos_token_ids)
    require(is_known, "an end-of-sequence token is not in the vocabulary")


def check_queue(queue: scheduler_pb2.QueueState) -> None:
    """Raises WrongMessage if a time is invalid."""
    _check_seconds(
        queue.max_queue_seconds,
        queue.seconds_per_request,
        queue.service_seconds,
        queue.seconds_per_prompt,
    )


def check_load(load: scheduler_pb2.ReplicaLoad) -> None:
    """Raises WrongMessage if a time is invalid or `num_other_requests` exceeds `num_requests`."""
    _check_seconds(load.seconds_per_prompt_token, load.seconds_per_decode)
    is_part = load.num_other_requests <= load.num_requests
    require(
        is_part,
        f"num_other_requests, {load.num_other_requests}, exceeds num_requests, {load.num_requests}",
    )


def _check_seconds(*times: float) -> None:
    for seconds in times:
        if not 0 <= seconds <= _LONGEST_SECONDS:  # true for NaN
            raise WrongMessage(f"a time of {seconds} s is impossible")
