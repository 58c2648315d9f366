"""Client sessions (requests that receive their input in turns) in the gateway's core: their state,
their replica, and their end.
"""

import pytest

from services.common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    StepwellError,
    Unavailable,
)
from services.common.request.finish import Finish, FinishReason
from services.common.request.prompt_embeds import EmbedsDtype, PromptEmbeds
from services.common.request.sampling import SamplingParams
from services.gateway.core.caller import ANYONE, Caller
from services.gateway.core.fleet.replica_description import ReplicaState
from services.gateway.core.request.inflight import Mailbox
from services.gateway.core.request.request import ClientRequest, EngineRequest, Prompt
from services.gateway.core.routing_decision import RoutingReason
from services.gateway.options.sessions.core.client_session import ClientSession
from services.gateway.options.sessions.core.client_sessions import (
    ClientSessions,
    SessionLimits,
    TooManySessions,
)
from services.gateway.options.sessions.core.turn import SessionTurn, turn_of
from tests.gateway.fake_fleet import FakeFleet, ManualClock

LENGTH = Finish(FinishReason.LENGTH)
A, B = Caller("a"), Caller("b")


class World:
    def __init__(self) -> None:
        self.fake = FakeFleet(policy="round-robin")
        self.fake.connect("a", "b")
        self.sessions = sessions_of(self.fake.clock)

    def turn(
        self,
        session: ClientSession,
        *chunk: int,
        caller: Caller = ANYONE,
        priority: int = 0,
        skips_cache: bool = False,
    ) -> Mailbox:
        """Begins a turn of a session with the input `chunk`."""
        sampling = SamplingParams(max_tokens=3, seed=1)
        prompt = [*session.token_ids, *chunk]
        turn = SessionTurn(session, prompt)
        turn.begin()
        request = EngineRequest(
            "r",
            prompt,
            sampling,
            priority,
            "",
            0,
            turn=turn,
            caller=caller,
            skip_reading_prefix_cache=skips_cache,
        )
        return self.fake.fleet.start([request])

    def say(self, mailbox: Mailbox, *tokens: int) -> None:
        """Sends the output `tokens` of a turn, and ends the turn."""
        (inflight,) = mailbox.inflights
        replica = self.fake.replicas[mailbox.routes[-1].address]
        inflight.tokens(list(tokens))
        replica.turn_ended(self.fake.handle(replica, inflight), LENGTH)
        assert inflight.request.turn is not None
        inflight.request.turn.add(tokens, LENGTH.reason, None)
        inflight.request.turn.end()


def sessions_of(clock: ManualClock, **limits: float) -> ClientSessions:
    given = {"max_sessions": 4, "max_sessions_per_caller": 2, "idle_seconds": 10.0} | limits
    names = iter(f"s{number}" for number in range(100))
    return ClientSessions(
        clock,
        SessionLimits(**given),  # type: ignore[arg-type]
        new_id=lambda: next(names),
        unix_seconds=clock.time,
    )


def test_a_turn_goes_on_at_the_replica_that_keeps_the_session() -> None:
    world = World()
    session = world.sessions.open(ANYONE)
    first = world.turn(session, 1, 2)
    world.say(first, 7, 8, 9)
    assert session.token_ids == [1, 2, 7, 8, 9]
    second = world.turn(session, 3)
    address = first.routes[0].address
    (route,) = second.routes
    assert (route.address, route.reason) == (address, RoutingReason.SESSION)
    assert route.num_cached_tokens == 4, "of the last token nothing was computed"
    assert world.fake.links[address].chunks == [(1, second.inflights[0], 4)]
    world.say(second, 5)
    assert session.token_ids == [1, 2, 7, 8, 9, 3, 5]


def test_a_session_that_is_kept_takes_a_place() -> None:
    world = World()
    session = world.sessions.open(ANYONE)
    mailbox = world.turn(session, 1)
    load = world.fake.replicas[mailbox.routes[0].address].load
    assert (load.num_requests, load.num_sessions) == (1, 0)
    world.say(mailbox, 7)
    assert (load.num_requests, load.num_sessions) == (1, 1)
    world.turn(session, 2)
    assert (load.num_requests, load.num_sessions) == (1, 0)


@pytest.mark.parametrize("way", ["lost", "refused", "ended", "stalled", "other priority", "skips"])
def test_a_session_that_is_not_kept_goes_on_with_all_its_tokens(way: str) -> None:
    world = World()
    session = world.sessions.open(ANYONE)
    first = world.turn(session, 1, 2)
    world.say(first, 7, 8)
    address = first.routes[0].address
    replica = world.fake.replicas[address]
    match way:
        case "lost":
            replica.closed("it died")
        case "refused":
            replica.rejected(1, Unavailable("others wait", reason="SESSION_GIVEN_UP"))
        case "ended":
            replica.finished(1, Finish(FinishReason.ABORT))
        case "stalled":
            state = ReplicaState(ready=False)
            replica.state_changed(state)
    second = world.turn(
        session, 3, priority=int(way == "other priority"), skips_cache=way == "skips"
    )
    (inflight,) = second.inflights
    assert inflight.request.prompt_token_ids == [1, 2, 7, 8, 3]
    assert second.routes[0].reason is not RoutingReason.SESSION
    assert replica.load.num_sessions == 0
    if way in ("stalled", "other priority", "skips"):
        assert world.fake.links[address].aborted == [1]


def test_a_turn_whose_replica_is_lost_goes_on_elsewhere_with_what_it_said() -> None:
    world = World()
    session = world.sessions.open(ANYONE)
    world.say(world.turn(session, 1, 2), 7, 8)
    mailbox = world.turn(session, 3)
    address = mailbox.routes[0].address
    mailbox.inflights[0].tokens([5])
    world.fake.replicas[address].closed("it died")
    assert mailbox.routes[-1].address != address
    (sent,) = world.fake.links[mailbox.routes[-1].address].added.values()
    assert (sent.request.prompt_token_ids, sent.output_token_ids) == ([1, 2, 7, 8, 3], [5])
    world.say(mailbox, 6)
    assert session.held is not None
    assert session.held.num_tokens == 6


def test_a_turn_that_is_given_up_leaves_the_session_as_it_was() -> None:
    world = World()
    session = world.sessions.open(ANYONE)
    world.say(world.turn(session, 1, 2), 7, 8)
    mailbox = world.turn(session, 3)
    mailbox.close()
    session.finish_turn(None)
    assert (session.token_ids, session.num_turns, session.held) == ([1, 2, 7, 8], 1, None)
    assert world.fake.links[mailbox.routes[0].address].aborted == [1]


def test_text_that_ends_before_the_output_does_releases_what_the_replica_keeps() -> None:
    world = World()
    session = world.sessions.open(ANYONE)
    mailbox = world.turn(session, 1, 2)
    (inflight,) = mailbox.inflights
    replica = world.fake.replicas[mailbox.routes[0].address]
    inflight.tokens([7, 8, 9])
    replica.turn_ended(1, LENGTH)
    session.finish_turn([1, 2, 7])
    assert session.held is None
    assert world.fake.links[replica.address].aborted == [1]


def test_a_session_that_its_client_ends_in_a_turn_is_released_after_it() -> None:
    world = World()
    session = world.sessions.open(ANYONE)
    mailbox = world.turn(session, 1, 2)
    world.sessions.end(session)
    world.say(mailbox, 7)
    assert session.held is None
    assert world.fake.links[mailbox.routes[0].address].aborted == [1]
    assert len(world.sessions) == 0


def test_one_turn_at_a_time() -> None:
    session = sessions_of(ManualClock()).open(ANYONE)
    session.begin_turn(0)
    with pytest.raises(FailedPrecondition, match="still generates a turn"):
        session.begin_turn(0)
    session.finish_turn([1])
    with pytest.raises(FailedPrecondition, match="another turn"):
        session.begin_turn(0)
    session.begin_turn(1)


def test_a_session_that_is_idle_for_too_long_ends_and_says_so() -> None:
    clock = ManualClock()
    sessions = sessions_of(clock)
    told: list[StepwellError] = []
    session = sessions.open(A, told.append)
    clock.advance(9)
    session.begin_turn(0)
    clock.advance(100)
    session.finish_turn([1, 2])
    clock.advance(9)
    assert sessions.find(session.session_id, A) is session
    clock.advance(2)
    with pytest.raises(NotFound, match="no turn of it began for 10 s") as raised:
        sessions.find(session.session_id, A)
    assert raised.value.error_reason == "SESSION_EXPIRED"
    assert told == [raised.value]
    assert (len(sessions), sessions.num_expired) == (0, 1)
    with pytest.raises(NotFound, match="there is no session"):
        sessions.find(session.session_id, B)
    with pytest.raises(NotFound, match="no turn of it began"):
        session.begin_turn(1)


def test_sessions_are_bounded_by_caller_and_in_all() -> None:
    sessions = sessions_of(ManualClock())
    first = sessions.open(A)
    sessions.open(A)
    with pytest.raises(TooManySessions):
        sessions.open(A)
    sessions.open(B)
    sessions.open(B)
    with pytest.raises(ResourceExhausted, match="4 sessions"):
        sessions.open(ANYONE)
    with pytest.raises(NotFound):
        sessions.find(first.session_id, B)
    sessions.end(first)
    sessions.end(first)
    sessions.open(A)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("prompt", {"prompts": (Prompt([]),)}),
        (
            "prompt_embeds",
            {"prompts": (Prompt([0], embeds=PromptEmbeds(1, EmbedsDtype.FLOAT32, bytes(4))),)},
        ),
    ],
)
def test_what_a_session_cannot_do_is_refused_by_name(field: str, given: dict[str, object]) -> None:
    session = sessions_of(ManualClock()).open(ANYONE)
    asked = {"prompts": (Prompt([1]),), "sampling": SamplingParams()} | given
    with pytest.raises(InvalidArgument) as raised:
        turn_of(session, ClientRequest("r", **asked))  # type: ignore[arg-type]
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("reason", "stop", "kept"),
    [
        (FinishReason.STOP, None, [1, 2, 5]),
        (FinishReason.STOP, 6, [1, 2, 5]),
        (FinishReason.STOP, "ab", [1, 2, 5, 6]),
        (FinishReason.LENGTH, None, [1, 2, 5, 6]),
        (None, None, []),
    ],
)
def test_a_token_that_ended_a_turn_is_left_out(
    reason: FinishReason | None, stop: str | int | None, kept: list[int]
) -> None:
    session = sessions_of(ManualClock()).open(ANYONE)
    turn = SessionTurn(session, [1, 2])
    turn.begin()
    turn.add([5], None, None)
    turn.add([6], reason, stop)
    turn.end()
    turn.end()
    assert (session.token_ids, session.num_turns) == (kept, int(bool(kept)))
