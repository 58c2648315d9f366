"""Scheduling with a KV connector, in scripted runs (scenarios). A block has four tokens."""

import asyncio
from typing import Any

import pytest

from services.common.pool.ids import RequestKey
from services.common.request.sampling import SamplingParams
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.kv_transfer import KVLoadFailurePolicy, KVRole
from services.scheduler.core.output import ModelRunnerOutput
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.ports import PoolLost
from services.scheduler.core.request import Request
from services.scheduler.options.transfers.core.kv_connector import ExternalMatch
from services.simulation.inprocess_pool import InProcessPool
from tests.scenarios.connector import ExternalTokens, connected
from tests.scenarios.run import run_scenario
from tests.scenarios.scenario import read_scenario
from tests.scenarios.stand_in_connector import StandInConnector
from tests.scenarios.stand_in_model import continuation
from tests.scheduler.engine_bench import Bench, running
from tests.scheduler.story import prompt

Record = dict[str, Any]

WINDOW = [{"type": "full"}, {"type": "sliding", "window": 5}]
STATES = [{"type": "full"}, {"type": "mamba", "mode": "align"}]


def request(name: str, num_tokens: int, *, first: int = 100, **fields: Any) -> Record:
    prompt = [first + offset for offset in range(num_tokens)]
    return {"request_id": name, "prompt_token_ids": prompt, "max_tokens": 4} | fields


def elsewhere(num_tokens: int, **fields: Any) -> Record:
    return {"external": {"tokens": num_tokens} | fields}


async def story(
    *adds: tuple[int, Record], aborts: tuple[tuple[int, str], ...] = (), **config: Any
) -> list[Record]:
    """Runs a scenario in which requests arrive, or are aborted, before the given steps. Returns the
    records of all steps.
    """
    events: list[Record] = [{"step": step, "add": add} for step, add in adds]
    events += [{"step": step, "abort": name} for step, name in aborts]
    connector = config.pop("connector", {})
    settings = {"block_size": 4, "num_gpu_blocks": 30, "max_model_len": 100}
    document = {
        "config": settings | {"kv_connector": connector} | config,
        "events": sorted(events, key=lambda event: event["step"]),
    }
    record = await run_scenario(read_scenario(document))
    assert record["status"] == "done"
    num_blocks = document["config"]["num_gpu_blocks"]
    assert record["final"]["free"] == num_blocks - 1
    return record["steps"]


async def test_what_is_loaded_within_a_step_is_found_in_that_step():
    steps = await story((0, request("a", 10, **elsewhere(6))), (0, request("b", 10)))
    assert steps[0]["loads"] == [["a", 6, False, [1, 2, 3]]]
    assert steps[0]["scheduled"] == [["a", 4], ["b", 2]]
    assert steps[0]["start"] == [6, 8]
    assert steps[0]["blocks"]["b"] == [1, 2, 4]


async def test_a_load_between_steps_takes_blocks_and_nothing_else():
    remote = elsewhere(8, **{"async": True, "delay": 2})
    steps = await story(
        (0, request("a", 9, **remote)), (0, request("b", 9, first=300)), max_num_seqs=1
    )
    assert steps[0]["loads"] == [["a", 8, True, [1, 2]]]
    assert steps[0]["scheduled"] == [["b", 9]]
    assert steps[0]["kv_waiting_after"] == ["a"]
    assert steps[2]["finished_recving"] == ["a"]
    assert steps[2]["num_cached_hashes"] == 2, "the loaded blocks are not found yet"
    assert (steps[4]["scheduled"], steps[4]["start"]) == ([["a", 1]], [8])
    assert steps[4]["num_cached_hashes"] == 5, "those of b, which filled a third, and of a"


async def test_the_last_token_of_a_prompt_that_was_loaded_whole_is_computed_again():
    steps = await story((0, request("a", 8, **elsewhere(8, **{"async": True}))))
    assert steps[0]["loads"] == [["a", 8, True, [1, 2]]]
    assert (steps[2]["scheduled"], steps[2]["start"]) == ([["a", 1]], [7])


async def test_who_is_loaded_is_admitted_before_those_that_wait():
    steps = await story(
        (0, request("a", 8, **elsewhere(8, **{"async": True}))),
        (0, request("b", 8, first=300)),
        (1, request("c", 8, first=500)),
        max_num_seqs=1,
    )
    order = [name for step in steps for name in step.get("new", ())]
    assert order == ["b", "a", "c"]


async def test_others_overtake_a_request_of_which_it_is_not_known_what_can_be_loaded():
    undecided = elsewhere(8, undecided=1)
    steps = await story((0, request("a", 9, **undecided)), (0, request("b", 9, first=300)))
    assert (steps[0]["new"], steps[0]["waiting_after"]) == (["b"], ["a"])
    assert (steps[1]["new"], steps[1]["start"]) == (["a"], [9, 8])


async def test_a_load_leaves_free_what_a_prefill_still_lacks():
    remote = elsewhere(8, **{"async": True})
    steps = await story(
        (0, request("a", 16)),
        (1, request("b", 8, first=300, **remote)),
        num_gpu_blocks=6,
        max_num_batched_tokens=8,
        scheduler_reserve_full_isl=False,
    )
    assert steps[1]["scheduled"] == [["a", 8]]
    assert next(step["step"] for step in steps if "loads" in step) > 1


async def test_blocks_stay_taken_while_they_are_sent():
    steps = await story((0, request("a", 6, max_tokens=1, send=3)))
    assert steps[0]["sends"] == [["a", [1, 2]]]
    assert [step["free"] for step in steps] == [27, 27, 27, 29]
    assert steps[3]["finished_sending"] == ["a"]


async def test_what_was_loaded_before_the_first_invalid_block_stays():
    remote = elsewhere(12, **{"async": True, "fail_blocks": [1]})
    steps = await story((0, request("a", 13, **remote)))
    assert steps[1]["invalid_blocks"] == [2]
    assert (steps[2]["scheduled"], steps[2]["start"]) == ([["a", 9]], [4])
    assert steps[2]["blocks"]["a"] == [1, 2, 3, 4]


async def test_a_victim_leaves_no_hash_of_a_block_that_was_not_loaded():
    """The first of the blocks that the request loads is invalid. The request computes half of this
    block, token by token, and is then preempted.
    """
    steps = await story(
        (0, request("a", 5, first=300) | {"max_tokens": 8}),
        (1, request("b", 13, **elsewhere(12, fail_blocks=[0], times=1))),
        num_gpu_blocks=7,
        max_num_batched_tokens=5,
        long_prefill_token_threshold=1,
        scheduler_reserve_full_isl=False,
    )
    assert steps[1]["invalid_blocks"] == [3]
    assert (steps[4]["preempted"], steps[4]["computed_before"]["b"]) == (["b"], 2)
    assert (steps[5]["resumed"], steps[5]["cached"]) == (["b"], {"b": 0})


async def test_with_nothing_valid_the_connector_is_asked_again():
    remote = elsewhere(12, **{"async": True, "fail_recving": True, "times": 1})
    steps = await story((0, request("a", 13, **remote)))
    assert steps[1]["failed_recving"] == ["a"]
    assert (steps[2]["scheduled"], steps[2]["start"]) == ([["a", 13]], [0])


@pytest.mark.parametrize(("others", "loads"), [((), [0, 2]), ((8,), [0, 4])])
async def test_a_failed_load_between_steps_waits_for_others_and_not_for_itself(
    others: tuple[int, ...], loads: list[int]
):
    """A load must leave free the blocks that prefills still need. A request whose load failed must
    be prefilled, and counts even for its own next load. If no request runs, it does not count for
    its own load, because it would wait for itself.
    """
    failing = {"async": True, "fail_recving": True}
    steps = await story(
        (0, request("a", 16, **elsewhere(16, **failing))),
        *((0, request("b", length, first=300)) for length in others),
        num_gpu_blocks=10,
    )
    assert [step["step"] for step in steps if "loads" in step] == loads


async def test_two_failed_loads_do_not_wait_for_each_other():
    """After the failures neither request has blocks. A load of one of them need not leave free the
    blocks that the other needs.
    """
    failing = {"async": True, "fail_recving": True}
    steps = await story(
        (0, request("a", 16, **elsewhere(16, **failing))),
        (0, request("b", 16, first=300, **elsewhere(16, **failing))),
        num_gpu_blocks=14,
    )
    assert [load[0] for step in steps for load in step.get("loads", [])] == ["a", "b", "a", "b"]


async def test_a_failed_load_does_not_wait_for_a_loaded_request_behind_it():
    """The second request was loaded. Its blocks are missing for the first request, which must be
    admitted before it. Therefore the second request is preempted.
    """
    failing = {"async": True, "fail_recving": True}
    steps = await story(
        (0, request("a", 16, **elsewhere(16, **failing))),
        (0, request("b", 16, first=300, **elsewhere(8, **{"async": True, "delay": 2}))),
        num_gpu_blocks=8,
        scheduler_reserve_full_isl=False,
    )
    assert [load[0] for step in steps for load in step.get("loads", [])] == ["a", "b", "a"]
    assert [step["preempted"] for step in steps if "preempted" in step] == [["b"]]


async def test_drafts_of_a_step_whose_token_is_dropped_follow_the_tokens_before_it():
    """The next step computes the tokens of the failed block again, with the drafts after them."""
    remote = elsewhere(8, fail_blocks=[1])
    steps = await story((0, request("a", 9, **remote)), num_speculative_tokens=2)
    assert "outputs" not in steps[0]
    assert steps[1]["scheduled"] == [["a", 7]]
    follow = continuation([100 + offset for offset in range(9)], 3)
    assert steps[1]["spec"] == {"a": follow[:2]}
    assert steps[1]["outputs"][0][1] == follow


async def test_a_prompt_of_one_token_is_loaded_once():
    """The only token is computed although it was loaded, because the next token is sampled from it.
    Then no token counts as computed, but the load is not repeated.
    """
    steps = await story((0, request("a", 1, **elsewhere(1, **{"async": True}))))
    assert [step["step"] for step in steps if "loads" in step] == [0]
    assert steps[2]["scheduled"] == [["a", 1]]


async def test_a_failed_load_of_a_prompt_of_one_token_ends_the_request():
    """The first KV-cache group has only states and no block to load, the other has a block."""
    steps = await story(
        (0, request("a", 1, **elsewhere(1, **{"async": True, "fail_recving": True}))),
        kv_cache_groups=STATES[::-1],
        connector={"load_failure_policy": "fail"},
    )
    assert steps[0]["loads"] == [["a", 1, True, [[], [1]]]]
    outputs = [output for step in steps for output in step.get("outputs", [])]
    assert outputs == [["a", [], "error", None]]


async def test_where_all_layers_keep_states_nothing_is_loaded_for_a_prompt_of_one_token():
    """The recurrent state before the only token is empty, so that there is nothing to load."""
    one = request("a", 1, **elsewhere(1, **{"async": True}))
    steps = await story((0, one), kv_cache_groups=STATES[1:])
    assert not any("loads" in step for step in steps)
    assert steps[0]["scheduled"] == [["a", 1]]


async def test_steps_in_flight_behind_a_failed_load_are_dropped_too():
    """The second step in flight was planned as if the first one had loaded all blocks."""
    remote = elsewhere(8, fail_blocks=[1], times=1)
    steps = await story((0, request("a", 10, **remote)), async_scheduling=True)
    assert [step["start"] for step in steps[:3]] == [[8], [10], [4]]
    outputs = [step["outputs"] for step in steps if step.get("outputs")]
    tokens = [token for output in outputs for _, tokens, *_ in output for token in tokens]
    assert tokens == continuation([100 + offset for offset in range(10)], 4)


async def test_a_window_holds_what_the_last_token_of_a_prompt_that_was_loaded_whole_sees():
    """The last token of the prompt is computed again. The window of its query includes both blocks.
    The window of the next token's query includes only the second block.
    """
    whole = elsewhere(8, **{"async": True})
    steps = await story((0, request("a", 8, **whole)), kv_cache_groups=WINDOW)
    loaded = next(step["blocks"]["a"] for step in steps if step.get("blocks"))
    assert loaded == [[1, 2], [3, 4]]


async def test_the_state_that_is_loaded_with_a_whole_prompt_is_the_one_before_its_last_token():
    """The last token is recomputed. It begins a block, where the state after it is stored."""
    whole = elsewhere(9, **{"async": True})
    steps = await story((0, request("a", 9, **whole)), kv_cache_groups=STATES)
    assert steps[0]["loads"] == [["a", 9, True, [[1, 2, 3], [0, 4]]]]
    begun = next(step for step in steps if step.get("scheduled"))
    assert begun["start"] == [8]
    assert begun["blocks"]["a"] == [[1, 2, 3], [0, 4, 5]]


async def test_by_policy_a_failed_load_ends_the_request_and_its_blocks_are_not_found():
    steps = await story(
        (0, request("a", 13, **elsewhere(12, fail_blocks=[1]))),
        (1, request("b", 13)),
        connector={"load_failure_policy": "fail"},
    )
    assert steps[0]["outputs"] == [["a", [], "error", None]]
    assert steps[1]["cached"] == {"b": 4}


async def test_blocks_computed_after_a_block_that_another_request_failed_to_load_are_not_found():
    """The second request hits the blocks that the first one loads in the same step."""
    steps = await story(
        (0, request("a", 9, **elsewhere(8, fail_blocks=[1]))),
        (0, request("b", 13)),
        (1, request("c", 5, first=300)),
        connector={"load_failure_policy": "fail"},
    )
    assert steps[0]["start"] == [8, 8]
    assert steps[0]["outputs"] == [["a", [], "error", None], ["b", [], "error", None]]
    assert steps[1]["num_cached_hashes"] == 2, "those of the first block, and of c's"


async def test_a_step_in_flight_keeps_the_blocks_that_it_writes():
    steps = await story(
        (0, request("a", 6)),
        (0, request("b", 6, first=300)),
        aborts=((2, "a"),),
        async_scheduling=True,
        connector={"role": "kv_consumer"},
    )
    assert steps[2]["aborted"] == ["a"]
    assert steps[1]["free"] == 25, "the step that was planned writes two blocks of each"


async def test_an_aborted_load_keeps_its_blocks_until_it_ends():
    remote = elsewhere(8, **{"async": True, "delay": 3})
    steps = await story((0, request("a", 9, **remote)), aborts=((1, "a"),))
    assert [step["free"] for step in steps] == [27, 27, 27, 29]
    assert steps[3]["finished_recving"] == ["a"]


async def test_blocks_that_a_window_has_left_are_not_sent():
    steps = await story((0, request("a", 12, max_tokens=1, send=2)), kv_cache_groups=WINDOW)
    assert steps[0]["blocks"]["a"] == [[1, 2, 3], [4, 5, 6]]
    assert steps[0]["freed"] == [5, 4]
    assert steps[0]["sends"] == [["a", [[1, 2, 3], [0, 0, 6]]]]


async def test_a_load_leaves_no_more_blocks_free_for_a_window_than_it_holds_at_once():
    remote = elsewhere(8, **{"async": True})
    steps = await story(
        (0, request("a", 40)),
        (1, request("b", 8, first=300, **remote)),
        num_gpu_blocks=20,
        max_num_batched_tokens=8,
        long_prefill_token_threshold=4,
        max_model_len=48,
        scheduler_reserve_full_isl=False,
        kv_cache_groups=WINDOW,
    )
    # The pool has 19 blocks. Request a holds 3 blocks of full attention and 2 of the window, and
    # lacks 7 and 1. Its window needs at most ceil(12 / 4) + 1 entries, of which 3 are in its table.
    # The load of request b needs two blocks of each group.
    assert steps[1]["loads"] == [["b", 8, True, [[7, 8], [9, 10]]]]


@pytest.mark.parametrize(("diverges", "num_loaded"), [(True, 4), (False, 12)])
async def test_a_load_that_brings_states_begins_where_full_attention_ends(
    diverges: bool, num_loaded: int
):
    steps = await story(
        (0, request("a", 13)),
        (
            3,
            {**request("b", 13), "prompt_token_ids": [*range(100, 108), 1, 2, 3, 4, 5]}
            | elsewhere(12),
        ),
        kv_cache_groups=STATES,
        connector={"divergent_hits": diverges},
    )
    ((name, num_tokens, is_async, tables),) = steps[3]["loads"]
    assert (name, num_tokens, is_async) == ("b", num_loaded, False)
    assert (steps[3]["start"][-1], steps[3]["cached"]) == (12, {"b": 12})
    first_blocks = steps[0]["blocks"]["a"][0][:2]
    assert (tables[0][:2] == first_blocks) == diverges


async def test_without_a_load_a_hit_is_one_of_all_groups():
    prompt = {"prompt_token_ids": [*range(100, 108), 1, 2, 3, 4, 5]}
    steps = await story(
        (0, request("a", 13)),
        (3, request("b", 13) | prompt),
        kv_cache_groups=STATES,
        connector={"divergent_hits": True},
    )
    assert (steps[3]["cached"], steps[3]["junction"]) == ({"b": 0}, {"b": 8})


async def test_a_pool_that_is_lost_while_a_failed_load_is_looked_at_costs_computation_only():
    """The request has lost its blocks, but still waits in the queue of requests that load."""
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=64,
        block_size=4,
        num_blocks=30,
        kv_role=KVRole.BOTH,
        kv_load_failure_policy=KVLoadFailurePolicy.RECOMPUTE,
    )
    source = ExternalTokens(8, is_async=True, fails_whole=True, max_loads=2)
    connector = StandInConnector(4, {RequestKey(1): source}, {})
    pool = InProcessPool(config)
    scheduler = Scheduler(config, pool, connected(connector))
    waiting = Request("a", RequestKey(1), list(range(9)), 9, SamplingParams(max_tokens=2))
    scheduler.add(waiting)
    plan = await scheduler.schedule()
    connector.step += 1
    results = connector.results(plan.step)
    scheduler.update_from_output(plan, ModelRunnerOutput([], kv_transfers=results))
    pool.num_answers_left = 0
    with pytest.raises(PoolLost):
        await scheduler.schedule()
    scheduler.forget_pool()
    pool.reopen()
    assert [len(loads) for loads in [(await scheduler.schedule()).loads for _ in range(2)]] == [
        1,
        0,
    ]


def test_a_connector_and_its_role_go_together():
    config = SchedulerConfig(8, 100, 100, 4, 10, kv_role=KVRole.BOTH)
    with pytest.raises(ValueError, match="a connector and its kv_role go together"):
        Scheduler(config, InProcessPool(config))


class Undecided(StandInConnector):
    """A connector that does not know the number of external tokens until the test sets `answer`."""

    answer: ExternalMatch | None = None

    def get_num_new_matched_tokens(
        self,
        request: Request,  # noqa: ARG002
        num_computed_tokens: int,  # noqa: ARG002
    ) -> ExternalMatch | None:
        return self.answer


async def test_the_loop_lets_others_run_while_no_request_can_be_scheduled() -> None:
    connector = Undecided(4, {}, {})
    async with running(Bench(connector=connector, enable_prefix_caching=False)) as bench:
        bench.add("a", prompt(9), max_tokens=3)
        await asyncio.sleep(0.01)  # would not return if the engine's loop never yielded
        assert bench.inbox.tokens == {}
        connector.answer = ExternalMatch(0, is_async=False)
        await bench.until_ended("a")
