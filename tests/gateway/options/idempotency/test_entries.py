"""Recordings of answers to requests with an idempotency key, and the journal entries from which
other gateways rebuild a recording.
"""

import random

import pytest

from services.common.errors import InvalidArgument, QuotaExceeded, ResourceExhausted
from services.common.request.finish import Finish, FinishReason
from services.gateway.core.request.delta import Delta
from services.gateway.core.request.identity import Identity
from services.gateway.core.request.logprobs import LogprobRows
from services.gateway.options.idempotency.core.entries import (
    Begin,
    Bring,
    DamagedEntry,
    Entry,
    Fail,
    Take,
    entry_from_bytes,
    entry_to_bytes,
)
from services.gateway.options.idempotency.core.journal import Position
from services.gateway.options.idempotency.core.key import KeyReused
from services.gateway.options.idempotency.core.log_view import LogView
from services.gateway.options.idempotency.core.recording import Cursor, Recording, Seen

IDENTITY = Identity("cmpl-7", 2**64 - 1, 2**62)
BEGIN = Begin(b"f" * 32, 3, IDENTITY)


def rows(token_ids: list[int], width: int = 2) -> LogprobRows:
    cells = [token for token in token_ids for _ in range(width)]
    return LogprobRows.of(width, cells, [-token / 3 for token in cells], [9] * len(token_ids))


@pytest.mark.parametrize(
    "entry",
    [
        BEGIN,
        Take("gateway-\u00e4"),
        Bring([]),
        Bring([(0, Seen(), Delta([1, 2, 2**31 - 1], num_cached_tokens=16))]),
        Bring(
            [
                (255, Seen(7, 3), Delta([5, 6], rows([5, 6]), rows([1]))),
                (1, Seen(), Delta(finish=Finish(FinishReason.STOP, 0))),
                (2, Seen(1), Delta(num_cached_tokens=0, finish=Finish(FinishReason.LENGTH))),
            ]
        ),
    ],
)
def test_entries_are_read_as_they_were_written(entry: Entry):
    assert entry_from_bytes(entry_to_bytes(entry)) == entry


@pytest.mark.parametrize("kind", [ResourceExhausted, QuotaExceeded])
def test_errors_keep_their_kind_and_what_they_say(kind: type[ResourceExhausted]):
    error = kind("full", reason="QUEUE_FULL", retry_after_seconds=1.5, may_retry=False)
    match entry_from_bytes(entry_to_bytes(Fail(error))):
        case Fail(found):
            assert type(found) is kind
            assert (found.message, found.error_reason) == ("full", "QUEUE_FULL")
            assert (found.field, found.retry_after_seconds, found.may_retry) == (None, 1.5, False)
        case other:
            pytest.fail(f"{other}")


def test_an_error_of_a_kind_that_others_may_not_know_is_of_the_kind_above():
    match entry_from_bytes(entry_to_bytes(Fail(KeyReused()))):
        case Fail(found):
            assert type(found) is InvalidArgument
            assert found.error_reason == "IDEMPOTENCY_KEY_REUSED"
        case other:
            pytest.fail(f"{other}")


def test_damage_is_noticed_wherever_it_is():
    value = entry_to_bytes(Bring([(0, Seen(), Delta([1, 2], rows([1, 2])))]))
    for place in range(len(value)):
        with pytest.raises(DamagedEntry):
            entry_from_bytes(value[:place] + bytes([value[place] ^ 1]) + value[place + 1 :])
        with pytest.raises(DamagedEntry):
            entry_from_bytes(value[:place])


def random_deltas(rng: random.Random) -> list[tuple[int, Delta]]:
    """The deltas of complete answers of three sequences, a few tokens each, in random order."""
    deltas = []
    for index in range(3):
        deltas.append((index, Delta(num_cached_tokens=index)))
        deltas.append((index, Delta(prompt_logprobs=rows([1, 2, 3]))))
        for _ in range(rng.randrange(1, 10)):
            token_ids = [rng.randrange(1000) for _ in range(rng.randrange(1, 4))]
            deltas.append((index, Delta(token_ids, rows(token_ids))))
        deltas.append((index, Delta(finish=Finish(FinishReason.LENGTH))))
    mixed: list[tuple[int, Delta]] = []
    queues = [[one for one in deltas if one[0] == index] for index in range(3)]
    while left := [queue for queue in queues if queue]:
        mixed.append(rng.choice(left).pop(0))
    return mixed


@pytest.mark.parametrize("seed", range(20))
def test_a_log_amounts_to_the_recording_however_it_is_cut_and_repeated(seed: int):
    rng = random.Random(seed)
    recording, view = Recording(3), LogView()
    cursor = Cursor(recording, lambda: None)
    position = Position(1, 0)
    view.apply([(position, entry_to_bytes(BEGIN))])
    for index, delta in random_deltas(rng):
        recording.add([(index, delta)])
        if rng.random() < 0.3:
            position = position.next
            view.apply([(position, entry_to_bytes(Bring(cursor.take())))])
        if rng.random() < 0.05:  # the lease's next owner writes the recording again
            cursor = Cursor(recording, lambda: None)
            position = position.next_fence
            view.apply([(position, entry_to_bytes(rng.choice([Take("b"), BEGIN])))])
    value = entry_to_bytes(Bring(cursor.take()))
    view.apply([(position.next, value)])
    view.apply([(position.next, value)])
    assert view.recording.sequences == recording.sequences
    assert view.recording.is_complete


def test_a_gap_is_damage():
    view = LogView()
    view.apply([(Position(1, 0), entry_to_bytes(BEGIN))])
    for parts in ([(0, Seen(1), Delta([5]))], [(3, Seen(), Delta([5]))]):
        with pytest.raises(DamagedEntry):
            view.apply([(Position(1, 1), entry_to_bytes(Bring(parts)))])


def test_what_follows_an_error_is_another_answer():
    view = LogView()
    view.apply([(Position(1, 0), entry_to_bytes(BEGIN))])
    failed = view.recording
    view.apply([(Position(1, 1), entry_to_bytes(Fail(ResourceExhausted("full"))))])
    assert failed.error is not None
    assert not view.has_answer
    view.apply([(Position(2, 0), entry_to_bytes(BEGIN))])
    assert view.has_answer
    assert view.recording is not failed
