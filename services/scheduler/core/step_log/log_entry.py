"""The entries of the step log, which records the calls and decisions of a scheduler.

An entry is a JSON object. `call` is the name of the called method. The other fields are the
method's arguments and results. A scheduler's decisions depend only on its calls, so a log of all
calls, in order, can be replayed. Requests are identified by `key`, a number.

    add                  the request: key, id, tokens (prompt and earlier output),
                         num_prompt_tokens, max_tokens, eos_token_ids, stop_token_ids,
                         repetition_detection (longest pattern, shortest pattern, count),
                         min_tokens, priority, arrival_time, cache_salt, reads_prefix_cache.
                         Only if present: adapter (SHA-256 of its files, in hexadecimal), grammar
                         (compiling, ready or failed), encoder_inputs (identifier, offset, length,
                         embeds or null), resumable (true for a session, a request with several
                         turns). Only if the policy decides about contexts: program (id, parent_id,
                         tool, ends, keep_seconds), tenant (in hexadecimal), tenant_weight,
                         tenant_max_retained_share
    grammar_compiled     key, error (empty unless compilation failed); with an error: reason (how
                         the request ends, by default "error")
    add_chunk            key of a session. For a next input: tokens, arrival_time, and the fields
                         of `add` from max_tokens to min_tokens. The end of the session has only
                         the key
    end_turn             context (number of the context that the turn left), tool, ends
    pause                mode
    resume
    abort                key, reason
    schedule             the plan: step, keys in scheduling order, num_scheduled_tokens and
                         num_computed_tokens (before the step) parallel to keys, new, resumed,
                         preemptions (victim, cause, lost tokens), block_tables, appended_blocks
                         and draft_token_ids by key, copies (group, source, target), wait_reason,
                         removed_rows; then num_running, num_waiting and num_free_blocks. Only if
                         present: passed_over (reasons by key), loads (key, tokens, whether between
                         steps), encoder_inputs (by key), evicted_encoder_inputs,
                         throttle_prefills
    update_from_output   step; token_ids and draft_token_ids parallel to the step's keys;
                         nan_requests (indexes); not_taken (by index, the tokens that were appended
                         instead of the sampled tokens, or null); ended (key, reason, stop token).
                         Only if present: refused_tokens (by index, the position of the first token
                         that the grammar refuses), grammar_errors (by index), turns (ended turns
                         of sessions, as in ended), pooled (indexes), kv_transfers
                         (finished_recving, finished_sending and failed_recving as keys,
                         invalid_block_ids)
    preempt_all          preempted
    forget_pool          preempted
    end_failed           ended (as in update_from_output); recorded if no step was in flight
    admit_only           keys of the only requests that may be admitted; null for all requests
    flush                num_free_blocks
    reset_prefix_cache   done
    reset_encoder_cache
    end                  the last entry; a log without this entry is incomplete

If the policy decides about contexts (KV blocks of ended requests), as the policy `program` does,
entries have two further fields. `now` is the time of a monotonic clock in seconds. Each `schedule`
has `now`, and other calls have it if the policy read the clock. `observed_steps` of a `schedule`
lists the steps whose durations became known before the call: number of requests, number of tokens,
seconds. The ids of new contexts are not logged, because a replay numbers contexts in the same way.

If the scheduler queried a KV connector during a call, the field `connector` of the entry lists the
results in order. There are three kinds of results: the number of tokens that can be loaded and
whether they are loaded between steps (null if not known yet); whether blocks of an ended request
are still read; whether transfers will free blocks.

A block table is a list of block ids for each KV-cache group. When an operator pauses the engine,
entries of `abort` and `flush` follow the entry of the pause. A reset of the prefix cache that
preempts requests is recorded as preempt_all and reset_prefix_cache. VERSION increases with every
change that makes older logs unreadable. Logs with `now` have TIMED_VERSION.
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
"""A dictionary of JSON types, which is equal after it was written as JSON and read again."""


def config_entry(config: SchedulerConfig) -> Entry:
    """The configuration in the log's header, which stores `fingerprint` and `groups` elsewhere."""
    values = {name.name: getattr(config, name.name) for name in fields(config)}
    del values["fingerprint"], values["groups"]
    return {
        name: value.value if isinstance(value, Enum) else value for name, value in values.items()
    }


def group_entry(group: KVCacheGroup) -> Entry:
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
    """What the client says about a request's program (a run of an agent), and the tenant."""
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
