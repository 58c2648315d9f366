"""The entries of the step log: the calls of a scheduler and its decisions.

An entry is a JSON object. `call` is the name of the called method. The other fields are the
method's arguments and results. A scheduler's decisions depend only on its calls, so a log of all
calls, in order, can be replayed.

    add                  the request: key, id, tokens (prompt, earlier output), num_prompt_tokens,
                         max_tokens, eos_token_ids, stop_token_ids, repetition_detection (longest
                         and shortest pattern, count), min_tokens, priority, arrival_time,
                         cache_salt, reads_prefix_cache; adapter (SHA-256 of its files, in
                         hexadecimal) and grammar (compiling, ready or failed) if it has one;
                         encoder_inputs, if it has any (identifier, offset, length, embeds or
                         null); resumable, if it is a session; program (id, parent_id, tool, ends,
                         keep_seconds) and tenant (hexadecimal) with its tenant_weight and
                         tenant_max_retained_share, if the request has them and the policy decides
                         about contexts
    grammar_compiled key, error (why it cannot be compiled. Empty if it is) and, with an error,
                         reason (how the request ends; error without it)
    add_chunk            key of a session, and its next input: tokens, arrival_time, how the turn
                         ends, as in `add`; without these, the end of the session
    end_turn             context (the number of the context that the turn left), tool, ends
    pause                mode: keep or abort the requests, and no step until resume, or wait
    resume
    abort                key, reason
    schedule             the plan: step, keys in scheduling order with num_scheduled_tokens and
                         num_computed_tokens before the step, new, resumed, preemptions (victim,
                         cause, tokens lost), block_tables and appended_blocks and draft_token_ids
                         by key, copies (group, source, target), wait_reason (why no waiting
                         request was admitted),
                         passed_over (reasons of single requests by key, if there are any),
                         loads (key, tokens, whether between steps; if any begin),
                         encoder_inputs (by key) and evicted_encoder_inputs, if there are any,
                         throttle_prefills, if the caller made prompts wait,
                         removed_rows; then num_running, num_waiting and num_free_blocks
    update_from_output   step, and parallel to its keys token_ids and draft_token_ids; nan_requests
                         and not_taken (the tokens appended instead; null: none) by index;
                         refused_tokens (the first token that the grammar refuses, by index) and
                         grammar_errors (why one failed, by index), if there are any;
                         ended (key, reason, stop token); turns, if any of sessions ended,
                         likewise; pooled, if there are any: indexes of the requests whose
                         prompt was pooled; kv_transfers, if there are any: finished_recving,
                         finished_sending and failed_recving (keys), invalid_block_ids
    preempt_all          preempted
    forget_pool          preempted
    end_failed           ended (as above), where no step was in flight
    admit_only           keys: all other requests are held back; null: no request is
    flush                num_free_blocks
    reset_prefix_cache   done
    reset_encoder_cache
    end                  the last entry; a log without it was cut short

If the policy decides about the contexts of ended requests, as `program` does, an entry has further
fields. `now` is the reading of a monotonic clock in seconds, in each `schedule`, and in other calls
if the policy asked for the time. `observed_steps` of a `schedule` lists the steps whose times
became known before it: the number of requests, the number of tokens, and seconds. A replay counts
contexts as the scheduler did, so the log does not name those that requests leave.

If the scheduler queried a connector during a call, the field `connector` of the entry has the
connector's answers in order. There are three kinds of answers: the number of tokens that can be
loaded and whether they are loaded between steps (null if not known yet); whether blocks of an ended
request are still read; whether transfers will free blocks.

Requests are identified by their key. A block table is a list of block ids for each group. A pause
calls `abort` and `flush`. The entries of these calls follow the entry of the pause. A reset that
preempts requests is recorded as preempt_all and reset_prefix_cache. VERSION increases with every
change that makes older logs unreadable. Logs with times have TIMED_VERSION.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from enum import Enum
from typing import Any

from services.common.pool.kv_cache_groups import KVCacheGroup
from services.common.pool.operations import BlockTables
from services.common.request.encoder_input import EncoderInput
from services.common.request.repetition import RepetitionDetection
from services.common.request.sampling import SamplingParams
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.kv_transfer import KVTransferResults
from services.scheduler.core.output import SchedulerOutput, WaitReason
from services.scheduler.core.request import Request, TurnEnd

SCHEMA = "stepwell.step_log"
VERSION = 4
TIMED_VERSION = 5

Entry = dict[str, Any]
"""A dictionary of JSON types. An entry that was written as JSON and read again equals the original.
"""


def config_entry(config: SchedulerConfig) -> Entry:
    """A configuration without `fingerprint` and `groups`, which the header has separately."""
    values = {name.name: getattr(config, name.name) for name in fields(config)}
    del values["fingerprint"], values["groups"]
    return {
        name: value.value if isinstance(value, Enum) else value for name, value in values.items()
    }


def group_entry(group: KVCacheGroup) -> Entry:
    """A KV-cache group as an element of the header's list of groups."""
    return {
        name: value.value if isinstance(value, Enum) else value
        for name, value in asdict(group).items()
    }


def sampling_entry(sampling: SamplingParams) -> Entry:
    return {
        "max_tokens": sampling.max_tokens,
        "eos_token_ids": sorted(set(sampling.eos_token_ids)),
        "stop_token_ids": sorted(set(sampling.stop_token_ids)),
        "repetition_detection": _repetition(sampling.repetition_detection),
        "min_tokens": sampling.min_tokens,
    }


def _repetition(repetition: RepetitionDetection | None) -> list[int] | None:
    if repetition is None:
        return None
    return [repetition.max_pattern_size, repetition.min_pattern_size, repetition.min_count]


def without_empty(entry: Entry) -> Entry:
    return {name: value for name, value in entry.items() if value}


def by_key(lists: dict[Request, list[int]]) -> dict[str, list[int]]:
    return {str(request.key): list(values) for request, values in lists.items()}


def item_entry(item: EncoderInput) -> list[str | int | list[int] | None]:
    embeds = None if item.embeds is None else list(item.embeds)
    return [item.identifier, item.offset, item.length, embeds]


def grammar_entry(request: Request) -> str | None:
    return request.grammar and request.grammar.value


def program_entry(request: Request) -> Entry:
    """What the client says about the program of a request, and the request's tenant."""
    program = request.program
    shares = {
        "tenant_weight": request.tenant_weight,
        "tenant_max_retained_share": request.tenant_max_retained_share,
    }
    return (shares if request.tenant else {}) | without_empty(
        {"program": program and asdict(program), "tenant": request.tenant.hex()}
    )


def reasons_entry(passed_over: Mapping[Request, WaitReason]) -> dict[str, str]:
    return {str(request.key): reason.value for request, reason in passed_over.items()}


def loads_entry(plan: SchedulerOutput) -> list[list[int | bool]]:
    return [[load.request.key, load.num_tokens, load.is_async] for load in plan.loads]


def transfers_entry(results: KVTransferResults) -> Entry:
    return without_empty(
        {
            "finished_recving": list(results.finished_recving),
            "finished_sending": list(results.finished_sending),
            "failed_recving": sorted(results.failed_recving),
            "invalid_block_ids": sorted(results.invalid_block_ids),
        }
    )


def keys_of(requests: Sequence[Request]) -> list[int]:
    return [request.key for request in requests]


def tables_entry(tables: dict[Request, BlockTables]) -> dict[str, list[list[int]]]:
    return {
        str(request.key): [list(blocks) for blocks in groups] for request, groups in tables.items()
    }


def end_entry(request: Request, end: Request | TurnEnd) -> list[int | str | None]:
    reason = end.finish_reason
    return [request.key, reason and reason.value, end.stop_token_id]
