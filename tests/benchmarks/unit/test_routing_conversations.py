"""The conversations on which routing policies are compared."""

from collections.abc import Iterator
from statistics import fmean

from benchmarks.routing.conversations import OpenConversations, Workload

WORKLOAD = Workload(
    num_conversations=40,
    num_turns=5,
    num_system_prompts=4,
    system_tokens=8,
    user_tokens=6,
    answer_tokens=2,
    num_warm_up=0,
    num_requests=0,
    vocab_size=1000,
    seed="test",
)


def turns(at_once: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yields the prompts of a closed loop. Requests end in the order in which they began."""
    conversations = OpenConversations(WORKLOAD, at_once)
    running = [conversations.take() for _ in range(at_once)]
    for _ in range(count):
        first = running.pop(0)
        yield tuple(first.token_ids)
        conversations.answered(first, [1] * WORKLOAD.answer_tokens)
        running.append(conversations.take())


def test_the_same_workload_is_sent_in_the_same_order() -> None:
    assert list(turns(4, 200)) == list(turns(4, 200))


def test_prompts_grow_by_a_turn_until_a_conversation_ends() -> None:
    lengths = {len(prompt) for prompt in turns(4, 400)}
    assert lengths == {8 + 8 * turns_before + 6 for turns_before in range(5)}


def test_a_conversation_rests_while_others_run() -> None:
    at_once, last, rests = 4, dict[tuple[int, ...], int](), []
    for number, prompt in enumerate(turns(at_once, 3000)):
        before = prompt[: -WORKLOAD.user_tokens - WORKLOAD.answer_tokens]
        if before in last:
            rests.append(number - last.pop(before))
        last[prompt] = number
    resting = WORKLOAD.num_conversations - at_once
    assert 0.8 * resting < fmean(rests) < 1.2 * WORKLOAD.num_conversations
    assert sum(rest < resting / 10 for rest in rests) < 0.1 * len(rests)
    assert sum(rest > 2 * resting for rest in rests) > 0.02 * len(rests)


def test_the_working_set_is_what_open_conversations_have_on_average() -> None:
    # 40 conversations have 3 blocks of 8 tokens on average, and 4 system prompts have one block.
    assert WORKLOAD.num_blocks(8) == 40 * 3 + 4
