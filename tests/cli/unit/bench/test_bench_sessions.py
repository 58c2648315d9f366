"""The requests of `stepwell bench`: synthetic ones, chat histories, traces and datasets."""

import json
import random
from dataclasses import asdict
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.bench.core.dataset import DatasetError, DatasetLoad, read_dataset
from services.cli.bench.core.lengths import Range
from services.cli.bench.core.program_load import ProgramLoad
from services.cli.bench.core.session import Conversation, Message, Turn
from services.cli.bench.core.synthetic import SyntheticLoad
from services.cli.bench.core.trace import TraceError, TraceLine, TraceLoad, read_trace
from services.cli.bench.core.vocabulary import WORDS, Vocabulary, counted_vocabulary
from services.simulation.laboratory.workloads import Traffic, generate

ONE_TOKEN_WORDS = Vocabulary(WORDS, 1.0, "test")


def num_words(text: str) -> int:
    return len(text.split())


def synthetic(**changes: object) -> SyntheticLoad:
    settings = {
        "vocabulary": ONE_TOKEN_WORDS,
        "input_len": Range(3, 9),
        "output_len": Range(5, 5),
        "prefix_len": 0,
        "num_prefixes": 1,
        "turns": Range(1, 1),
        "think_seconds": Range(0, 0),
        "seed": 1,
    }
    return SyntheticLoad(**{**settings, **changes})  # type: ignore[arg-type]


def test_lengths_are_within_their_range() -> None:
    sessions = list(islice(synthetic(), 200))
    lengths = {num_words(session.turns[0].messages[0].content) for session in sessions}
    assert lengths == set(range(3, 10))


def test_a_seed_fixes_every_session() -> None:
    load = synthetic(prefix_len=4, num_prefixes=3, turns=Range(1, 4), think_seconds=Range(0, 2))
    assert list(islice(load, 20)) == [load.session(number) for number in range(20)]
    assert load.session(7) != synthetic(seed=2).session(7)


def test_sessions_begin_with_one_of_the_prefixes() -> None:
    load = synthetic(prefix_len=40, num_prefixes=3)
    prefixes = {session.turns[0].messages[0] for session in islice(load, 100)}
    assert len(prefixes) == 3
    assert {(prefix.role, num_words(prefix.content)) for prefix in prefixes} == {("system", 40)}


def test_only_the_first_turn_has_the_prefix_and_no_time_to_think() -> None:
    session = synthetic(prefix_len=4, turns=Range(3, 3), think_seconds=Range(2, 2)).session(0)
    assert [len(turn.messages) for turn in session.turns] == [2, 1, 1]
    assert [turn.think_seconds for turn in session.turns] == [0, 2, 2]


def test_a_history_has_the_answers_as_the_server_gave_them() -> None:
    first = Turn((Message("system", "a b"), Message("user", "c")), 1)
    chat, text = Conversation(is_chat=True), Conversation(is_chat=False)
    assert text.ask(first) == {"prompt": "a b c"}
    chat.ask(first)
    for conversation in (chat, text):
        conversation.answered(", d\n")
    second = Turn((Message("user", "e"),), 1)
    assert text.ask(second) == {"prompt": "a b c, d\n e"}
    assert [(m["role"], m["content"]) for m in chat.ask(second)["messages"]] == [
        ("system", "a b"),
        ("user", "c"),
        ("assistant", ", d\n"),
        ("user", "e"),
    ]


def test_words_that_are_several_tokens_are_left_out() -> None:
    """The tokenizer splits words after every three letters, so only shorter ones are used."""

    def count_tokens(text: str) -> int:
        return sum(-(-len(word) // 3) for word in text.split())

    vocabulary = counted_vocabulary(count_tokens, "test")
    assert max(map(len, vocabulary.words)) == 3
    assert vocabulary.is_exact
    assert count_tokens(vocabulary.text(random.Random(0), 50)) == 50


def test_a_tokenizer_of_letters_is_met_on_average() -> None:
    vocabulary = counted_vocabulary(lambda text: len(text.replace(" ", "")), "test")
    assert not vocabulary.is_exact
    text = vocabulary.text(random.Random(0), 5000)
    assert len(text.replace(" ", "")) == pytest.approx(5000, rel=0.1)


TRACE_LINES = st.builds(
    lambda timestamp, length, output, ids: TraceLine(
        timestamp, length, output, tuple(ids[: -(-length // 512)])
    ),
    st.integers(0, 10**7),
    st.integers(1, 4096),
    st.integers(1, 2000),
    st.lists(st.integers(0, 10**6), min_size=8, max_size=8),
)


@given(st.lists(TRACE_LINES))
def test_a_trace_is_read_as_it_was_written(lines: list[TraceLine]) -> None:
    written = [json.dumps(asdict(line)) for line in lines]
    assert read_trace(written) == sorted(lines, key=lambda line: line.timestamp)


PUBLISHED = (
    '{"timestamp": 27482, "input_length": 6955, "output_length": 52, '
    '"hash_ids": [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2353, 2354]}',
    '{"timestamp": 30535, "input_length": 6472, "output_length": 26, '
    '"hash_ids": [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2366]}',
)
"""The two lines of a trace that Mooncake's documentation shows."""


def trace_load(lines: list[TraceLine], **changes: float) -> TraceLoad:
    scales = {"time_scale": 1.0, "token_scale": 1.0, **changes}
    return TraceLoad(lines, ONE_TOKEN_WORDS, seed=0, **scales)  # type: ignore[arg-type]


def test_equal_hash_ids_are_equal_text() -> None:
    first, second = trace_load(read_trace(PUBLISHED))
    one, other = (s.turns[0].messages[0].content.split() for s in (first, second))
    assert (len(one), len(other)) == (6955, 6472)
    assert one[: 12 * 512] == other[: 12 * 512]
    assert one[12 * 512 :][:20] != other[12 * 512 :][:20]
    assert (first.arrival_seconds, second.arrival_seconds) == (0.0, 3.053)
    assert [turn.output_len for turn in (*first.turns, *second.turns)] == [52, 26]


def test_a_partial_block_is_the_beginning_of_the_whole_one() -> None:
    lines = [TraceLine(0, 600, 1, (1, 2)), TraceLine(1, 1024, 1, (1, 2))]
    partial, whole = (s.turns[0].messages[0].content.split() for s in trace_load(lines))
    assert (partial, len(whole)) == (whole[:600], 1024)


def test_a_trace_can_be_made_shorter_and_faster() -> None:
    _, second = trace_load(read_trace(PUBLISHED), time_scale=0.5, token_scale=1 / 64)
    assert second.arrival_seconds == pytest.approx(3.053 / 2)
    assert num_words(second.turns[0].messages[0].content) == 12 * 8 + round(328 / 64)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 is not an object"),
        ('{"timestamp": 1, "input_length": 3, "output_length": 1}', "line 2: hash_ids must be"),
        (
            '{"delay": 1, "input_length": 3, "output_length": 1, "hash_ids": [1]}',
            "line 2: timestamp must be a number of at least 0, not None",
        ),
        (
            '{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []}',
            "line 2: input_length must be",
        ),
        (
            '{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            "line 2: input_length 513 has 2 blocks of 512 tokens, but hash_ids has 1",
        ),
    ],
)
def test_a_bad_line_of_a_trace_is_named(line: str, sentence: str) -> None:
    with pytest.raises(TraceError, match=sentence):
        read_trace([PUBLISHED[0], line])


def dataset_load(text: str, turns: int = 9) -> DatasetLoad:
    return DatasetLoad(read_dataset(text), Range(1, turns), Range(7, 7), Range(0, 0), seed=0)


def test_a_dataset_of_json_lines() -> None:
    lines = [
        {"prompt": "one", "output_tokens": 3},
        {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "?"}]},
    ]
    load = dataset_load("\n".join(map(json.dumps, lines)))
    first, second, again = islice(load, 3)
    assert first.turns == [Turn((Message("user", "one"),), 3)]
    assert second.turns == [Turn((Message("system", "be brief"), Message("user", "?")), 7)]
    assert again.turns == first.turns


def test_a_dataset_in_share_gpts_form() -> None:
    conversation = [
        {"from": "human", "value": "hello"},
        {"from": "gpt", "value": "recorded"},
        {"from": "human", "value": "more"},
    ]
    text = json.dumps([{"id": "x", "conversations": conversation}])
    all_turns = max((s.turns for s in islice(dataset_load(text), 20)), key=len)
    assert [turn.messages[0].content for turn in all_turns] == ["hello", "more"]
    assert [len(s.turns) for s in islice(dataset_load(text, turns=1), 3)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the file has no prompt"),
        ('{"prompt": "a"}\n{', "line 2 is not JSON"),
        ('{"text": "a"}', "line 1 has neither prompt, messages nor conversations"),
        ('{"prompt": "a", "output_tokens": 0}', "line 1: output_tokens must be"),
        ('[{"conversations": 3}]', "item 1: conversations must be a list"),
    ],
)
def test_a_bad_item_of_a_dataset_is_named(text: str, sentence: str) -> None:
    with pytest.raises(DatasetError, match=sentence):
        read_dataset(text)


def swe_programs(*, says_names: bool = True) -> ProgramLoad:
    traffic = Traffic(12, 1.0, seed=3, scale=0.1, max_tokens=600)
    return ProgramLoad(generate("swe", traffic), ONE_TOKEN_WORDS, seed=3, says_names=says_names)


def test_programs_have_the_lengths_and_pauses_of_the_laboratory() -> None:
    traffic = Traffic(12, 1.0, seed=3, scale=0.1, max_tokens=600)
    for program, session in zip(generate("swe", traffic), swe_programs(), strict=True):
        new = [num_words(turn.messages[-1].content) for turn in session.turns]
        assert new == [turn.num_new_tokens for turn in program.turns]
        pauses = [turn.think_seconds for turn in session.turns]
        assert pauses == [0.0, *(turn.pause_seconds for turn in program.turns[1:])]
        assert num_words(session.turns[0].messages[0].content) == program.num_shared_tokens


def test_a_program_names_itself_its_tools_and_its_last_turn() -> None:
    sessions = list(swe_programs())
    names = {turn.fields["job_id"] for session in sessions for turn in session.turns}
    assert len(names) == len(sessions) == 12
    for session in sessions:
        *turns, last = session.turns
        assert {turn.fields["this_func_call"] for turn in turns} <= {"sed", "python", "pytest"}
        assert last.fields["is_last_step"]
    anonymous = list(swe_programs(says_names=False))
    assert [len(one.turns) for one in anonymous] == [len(one.turns) for one in sessions]
    assert not any(turn.fields for session in anonymous for turn in session.turns)
    asked = Conversation(is_chat=True).ask(sessions[0].turns[-1])
    assert asked["is_last_step"]
