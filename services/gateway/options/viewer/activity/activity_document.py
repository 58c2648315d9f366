"""Formats the activity of a replica as JSON, with times in seconds and enum names in lower case."""

from collections.abc import Iterable
from typing import Any

from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2

Document = dict[str, Any]

_REQUEST_STATE = "REQUEST_STATE_"
_WAIT_REASON = "WAIT_REASON_"
_UNSPECIFIED = "unspecified"


def request_document(request: scheduler_pb2.RequestActivity, unix_nanos: int) -> Document:
    """Describes a running or waiting request. `unix_nanos` is the current Unix time."""
    state = scheduler_pb2.RequestState.Name(request.state).removeprefix(_REQUEST_STATE).lower()
    return {
        "key": request.key,
        "request_id": request.request_id,
        "trace_id": request.trace_id,
        "state": state,
        "wait_reason": _reason(request.wait_reason),
        "seconds": max(0, unix_nanos - request.queued_unix_nanos) / 1e9,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_output_tokens": request.num_output_tokens,
        "num_computed_tokens": request.num_computed_tokens,
        "num_cached_tokens": request.num_cached_tokens,
        "num_preemptions": request.num_preemptions,
    }


def step_documents(
    steps: Iterable[scheduler_pb2.StepActivity], done_before_nanos: int
) -> Iterable[Document]:
    """Describes consecutive steps. Because steps overlap, a step's duration is measured from the
    end of the previous step. `done_before_nanos` is the end of the step before the first one.
    """
    for step in steps:
        began = max(step.begun_unix_nanos, done_before_nanos)
        done_before_nanos = step.done_unix_nanos
        yield {
            "step": step.step,
            "began_unix_seconds": began / 1e9,
            "seconds": max(0, step.done_unix_nanos - began) / 1e9,
            "num_requests": step.num_requests,
            "num_prefill_tokens": step.num_prefill_tokens,
            "num_decode_tokens": step.num_decode_tokens,
            "num_preemptions": step.num_preemptions,
            "wait_reason": _reason(step.wait_reason),
            "keys": list(step.keys),
            "num_tokens": list(step.num_tokens),
        }


def blocks_document(blocks: common_pb2.BlockMap) -> Document:
    """Describes a map of KV blocks. `states` has one digit for the state of each cell."""
    return {
        "blocks_per_cell": blocks.blocks_per_cell,
        "states": "".join(map(str, blocks.states)),
        "owners": list(blocks.owners),
        "num_blank": blocks.num_blank,
        "num_cached": blocks.num_cached,
        "num_held": blocks.num_held,
        "num_shared": blocks.num_shared,
        "num_retained": blocks.num_retained,
    }


def program_document(program: scheduler_pb2.PausedProgram) -> Document:
    """Describes an agent program, the requests of one run of an agent, between two requests."""
    return {
        "program": program.program,
        "tool": program.tool,
        "seconds": program.paused_nanos / 1e9,
        "num_turns": program.num_turns,
        "num_tokens": program.num_tokens,
        "num_blocks": program.num_blocks,
    }


def _reason(number: int) -> str | None:
    if number not in scheduler_pb2.WaitReason.values():
        return None
    name = scheduler_pb2.WaitReason.Name(scheduler_pb2.WaitReason.ValueType(number))
    reason = name.removeprefix(_WAIT_REASON).lower()
    return None if reason == _UNSPECIFIED else reason
