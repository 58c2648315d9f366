"""Compares the record of a run of our scheduler with a recording of vLLM's decisions."""

from typing import Any

from tests.conformance.recording import Record, Recording


def assert_as_recorded(recording: Recording, ours: Record) -> None:
    """Asserts that `ours`, the record of our run of the scenario, has vLLM's decisions."""
    policy = recording.scenario["config"].get("policy", "fcfs")
    assert differences(recording.recorded, ours, FIELDS, policy=policy) == []


def differences(
    golden: dict[str, Any], ours: dict[str, Any], fields: list[str], *, policy: str = "fcfs"
) -> list[str]:
    """Returns all differing fields of steps and requests. An absent field equals an empty field.

    With the policy `priority`, queues are compared as sets, because vLLM records its heap, whose
    inner order is not a decision.
    """
    found = []
    unordered = _QUEUES if policy == "priority" else ()
    theirs, mine = ({s["step"]: s for s in record["steps"]} for record in (golden, ours))
    for step in sorted(theirs.keys() | mine.keys()):
        for name in fields:
            want, have = theirs.get(step, {}).get(name), mine.get(step, {}).get(name)
            if name in unordered:
                want, have = sorted(want or ()), sorted(have or ())
            if want != have and (want or have):
                found.append(f"step {step} {name}: recorded {want}, got {have}")
    for request_id, want in golden["requests"].items():
        for name, value in want.items():
            have = ours["requests"].get(request_id, {}).get(name)
            if have != value:
                found.append(f"request {request_id} {name}: recorded {value}, got {have}")
    return found


_QUEUES = ("waiting", "waiting_after", "kv_waiting", "kv_waiting_after")
FIELDS = [
    *("added", "aborted", "rejected", "waiting", "running", "computed_before", "scheduled"),
    *("start", "new", "resumed", "cached", "blocks", "preempted", "finished_before", "update_of"),
    *("spec", "accepted"),
    *("outputs", "free", "free_head", "free_sha", "num_cached_hashes", "free_sched"),
    *("free_head_sched", "free_sha_sched", "num_cached_hashes_sched", "running_after"),
    *("waiting_after", "kv_waiting", "kv_waiting_after", "deferred_after", "ignored"),
    *("nulled", "tables_sha_sched", "junction", "to_zero", "copies", "freed_sched", "freed"),
    *("loads", "remote_after", "finished_recving", "failed_recving", "invalid_blocks"),
    *("sends", "finished_sending", "deferred_frees"),
    *("grammar_ready", "drafts_checked"),
    *("encoder", "encoder_evicted", "encoder_cache", "reset_encoder_cache"),
    *("paused", "unpaused", "pause_complete", "reset", "reset_preempted"),
]
