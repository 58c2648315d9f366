"""A mapping of limited size holds the items that were set or used last."""

from services.common.recent import Recent


def test_the_items_set_longest_ago_are_dropped() -> None:
    recent: Recent[str, int] = Recent(2)
    for number, name in enumerate(("a", "b", "a", "c")):
        recent[name] = number
    assert list(recent.items()) == [("a", 2), ("c", 3)]
    assert recent.pop("c", None) == 3
    assert recent.pop("c", None) is None
    recent["d"] = 4
    recent.move_to_end("a")
    recent["e"] = 5
    assert list(recent) == ["a", "e"]
