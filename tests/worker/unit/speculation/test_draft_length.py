"""How many drafts a request gets depends on how many of its earlier drafts were accepted."""

from services.worker.core.drafts.drafter import DraftLength


def test_the_number_stays_at_its_maximum_while_drafts_are_accepted() -> None:
    length = DraftLength(6)
    for num_accepted in (6, 3, 1, 0, 2, 0, 6):
        assert length.next() == 6
        length.verified(6, num_accepted)


def test_two_rejections_halve_the_number_and_full_acceptance_doubles_it() -> None:
    length, taken = DraftLength(5), list[int]()
    for num_accepted in (0, 0, 0, 0, 1, 2, 4):
        taken.append(length.next())
        length.verified(taken[-1], num_accepted)
    assert taken == [5, 5, 2, 2, 1, 2, 4]
    assert length.next() == 5


def test_pauses_grow_while_every_draft_is_rejected() -> None:
    length, rests, rest = DraftLength(1), list[int](), 0
    for _ in range(300):
        if length.next():
            length.verified(1, 0)
            rests += [rest] if rest else []
            rest = 0
        else:
            rest += 1
    assert rests == [8, 16, 32, 64, 64, 64]


def test_one_accepted_draft_ends_the_pauses() -> None:
    length = DraftLength(1)
    for _ in range(2):
        length.verified(length.next(), 0)
    assert [length.next() for _ in range(9)] == [0] * 8 + [1]
    length.verified(1, 1)
    for _ in range(2):
        length.verified(length.next(), 0)
    assert [length.next() for _ in range(9)] == [0] * 8 + [1]
