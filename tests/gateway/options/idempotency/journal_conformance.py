"""The tests that every implementation of the port Journal must pass.

A Journal stores the answers to requests with idempotency keys in logs, which all gateways share. A
test class inherits from JournalConformance and defines the fixture `journals`: the journals of two
gateways over the same logs, with leases of LEASE_SECONDS.
"""

import asyncio

from services.gateway.options.idempotency.core.journal import Append, Appended, Journal, Position

LEASE_SECONDS = 0.8
FIRST = Position(1, 0)

Journals = tuple[Journal, Journal]


def entry(number: int, *, fence: int = 1, value: bytes = b"v", scope: str = "s") -> Append:
    """An append of an entry to a log, by default by the lease's first owner (fence 1)."""
    return Append(scope, Position(fence, number), value, begins=number == 0 and fence == 1)


async def append(journal: Journal, *appends: Append) -> list[Appended]:
    return await journal.append(appends)


class JournalConformance:
    async def test_the_first_to_open_gets_the_lease_and_finds_nothing(self, journals: Journals):
        ours, theirs = journals
        took, news = await ours.open("s")
        assert took
        assert list(news.entries) == []
        took, _ = await theirs.open("s")
        assert not took
        took, _ = await theirs.open("other")
        assert took

    async def test_entries_are_read_in_order_and_from_a_place_on(self, journals: Journals):
        ours, theirs = journals
        await ours.open("s")
        values = [b"\x00\xff\r\n", b"", bytes(range(256))]
        for number, value in enumerate(values):
            assert await append(ours, entry(number, value=value)) == [Appended.DONE]
        _, news = await theirs.open("s")
        assert list(news.entries) == [(Position(1, n), value) for n, value in enumerate(values)]
        missing, rest, none = await theirs.read(
            [("missing", FIRST), ("s", FIRST), ("s", Position(1, 2))]
        )
        assert (list(missing.entries), missing.is_leased) == ([], False)
        assert (list(rest.entries), rest.is_leased) == (list(news.entries)[1:], True)
        assert list(none.entries) == []

    async def test_a_lease_ends_unless_entries_renew_it(self, journals: Journals):
        ours, theirs = journals
        await ours.open("s")
        await append(ours, entry(0))
        for number in range(1, 6):
            await asyncio.sleep(LEASE_SECONDS / 4)
            await append(ours, entry(number))
            assert not (await theirs.open("s"))[0]
        async with asyncio.timeout(60):
            while (await theirs.read([("s", FIRST)]))[0].is_leased:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await theirs.open("s"))[0]

    async def test_a_last_entry_gives_the_lease_back(self, journals: Journals):
        ours, theirs = journals
        await ours.open("s")
        await append(ours, entry(0), Append("s", Position(1, 1), b"", keeps_lease=False))
        took, news = await theirs.open("s")
        assert took
        assert len(news.entries) == 2
        await theirs.release("s")
        assert (await ours.open("s"))[0]

    async def test_a_higher_fence_shuts_the_old_owner_out(self, journals: Journals):
        ours, theirs = journals
        await ours.open("s")
        await append(ours, entry(0), entry(1))
        assert await append(theirs, entry(0, fence=2)) == [Appended.DONE]
        assert await append(ours, entry(2), entry(7)) == [Appended.FENCED] * 2
        assert await append(theirs, entry(1, fence=2)) == [Appended.DONE]
        _, news = await ours.open("s")
        assert [position for position, _ in news.entries] == [
            *(FIRST, Position(1, 1)),
            *(Position(2, 0), Position(2, 1)),
        ]

    async def test_a_former_owner_neither_releases_nor_renews_the_lease(self, journals: Journals):
        ours, theirs = journals
        await ours.open("s")
        await append(ours, entry(0))
        await append(theirs, entry(0, fence=2))
        last = Append("s", Position(1, 1), b"", keeps_lease=False)
        assert await append(ours, last) == [Appended.FENCED]
        assert (await theirs.read([("s", FIRST)]))[0].is_leased
        await theirs.release("s")
        assert await append(ours, entry(1)) == [Appended.FENCED]
        assert not (await theirs.read([("s", FIRST)]))[0].is_leased

    async def test_of_two_that_append_at_one_position_one_is_fenced(self, journals: Journals):
        outcomes = await asyncio.gather(
            *(append(journal, entry(0, value=bytes([n]))) for n, journal in enumerate(journals))
        )
        assert sorted(outcome.value for [outcome] in outcomes) == ["done", "fenced"]

    async def test_an_entry_that_is_repeated_word_for_word_is_appended_once(
        self, journals: Journals
    ):
        ours, _ = journals
        for _ in range(2):
            assert await append(ours, entry(0, value=b"once")) == [Appended.DONE]
        assert await append(ours, entry(0, value=b"else")) == [Appended.FENCED]
        _, news = await ours.open("s")
        assert len(news.entries) == 1

    async def test_a_log_that_is_gone_is_not_begun_in_the_middle(self, journals: Journals):
        ours, theirs = journals
        await append(ours, entry(0))
        await theirs.forget(["s", "never there"])
        assert await append(ours, entry(1)) == [Appended.LOST]
        assert list((await ours.open("s"))[1].entries) == []
        again = Append("s", Position(2, 0), b"", begins=True)
        assert await append(ours, again) == [Appended.DONE]

    async def test_an_append_that_is_fenced_does_not_touch_other_logs(self, journals: Journals):
        ours, _ = journals
        scopes = [f"scope{number}" for number in range(20)]
        assert await append(ours, *(entry(0, scope=scope) for scope in scopes)) == [
            Appended.DONE
        ] * len(scopes)
        outcomes = await append(
            ours, *(entry(number % 2, scope=s, value=b"w") for number, s in enumerate(scopes))
        )
        assert outcomes == [Appended.FENCED, Appended.DONE] * 10
        news = await ours.read([(scope, Position()) for scope in scopes])
        assert [len(one.entries) for one in news] == [1, 2] * 10
        assert await ours.append([]) == []
        assert await ours.read([]) == []
        await ours.forget([])
        await ours.ping()
