"""The number of drafts of a request depends on the acceptance of earlier drafts."""

from services.worker.speculation.draft_length import DraftLength


def test_as_many_as_there_may_be_while_they_stand() -> None:
    length = DraftLength(6)
    for num_accepted in (6, 3, 1, 0, 2, 0, 6):
        assert length.next() == 6
        length.verified(6, num_accepted)


def test_half_as_many_after_two_of_which_none_stood_and_twice_after_all_did() -> None:
    length, taken = DraftLength(5), list[int]()
    for num_accepted in (0, 0, 0, 0, 1, 2, 4):
        taken.append(length.next())
        length.verified(taken[-1], num_accepted)
    assert taken == [5, 5, 2, 2, 1, 2, 4]
    assert length.next() == 5


def test_longer_and_longer_rests_where_none_ever_stands() -> None:
    length, rests, rest = DraftLength(1), list[int](), 0
    for _ in range(300):
        if length.next():
            length.verified(1, 0)
            rests += [rest] if rest else []
            rest = 0
        else:
            rest += 1
    assert rests == [8, 16, 32, 64, 64, 64]


def test_one_that_stands_ends_the_rests() -> None:
    length = DraftLength(1)
    for _ in range(2):
        length.verified(length.next(), 0)
    assert [length.next() for _ in range(9)] == [0] * 8 + [1]
    length.verified(1, 1)
    for _ in range(2):
        length.verified(length.next(), 0)
    assert [length.next() for _ in range(9)] == [0] * 8 + [1]
