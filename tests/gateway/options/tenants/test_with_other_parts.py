"""Tenants together with several models, client sessions, other routes, and hostile clients."""

from pathlib import Path

import pytest

from services.common.keys.api_keys import TenantRecord
from services.common.request.adapter import Adapter
from services.common.request.finish import Finish, FinishReason
from services.common.request.sampling import SamplingParams
from services.gateway.core.lora_modules import LoraModules
from services.gateway.core.request.inference import Inference
from services.gateway.core.request.request import EngineRequest
from services.gateway.core.routing_decision import RoutingReason
from services.gateway.options.sessions.core.client_sessions import ClientSessions, SessionLimits
from services.gateway.options.sessions.core.turn import SessionTurn
from services.gateway.options.tenants.core.tenant import Tenant
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.integration.transport.test_gateway_hostility import leave_nothing
from tests.gateway.keyring import FileKeyring, bearer
from tests.gateway.options.tenants.tenant_fleet import A, connected, queues_of
from tests.gateway.serving import serving

LIMITED = {
    *("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"),
    *("/v1/embeddings", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    *("/classify", "/pooling", "/inference/v1/generate"),
}


def test_an_unknown_model_is_answered_with_those_that_the_key_may_use() -> None:
    inference = object.__new__(Inference)
    inference.model_name, inference.others = "demo", ()
    inference.adapters = LoraModules("demo")
    inference.adapters.add(Adapter(b"", "a1", "/a1"))
    for models, names in (({"a1"}, "'a1'"), (set(), "none that this key may use")):
        assert inference._names_for(Tenant("t", models=frozenset(models))) == names


def test_a_turn_keeps_its_slot_and_does_not_queue_again() -> None:
    world = connected(num_slots=1)
    sessions = ClientSessions(
        world.clock, SessionLimits(4, 2, 10.0), new_id=lambda: "s", unix_seconds=world.clock.time
    )
    session = sessions.open(A)
    for reason in (RoutingReason.ONLY, RoutingReason.SESSION):
        prompt = [*session.token_ids, 1]
        turn = SessionTurn(session, prompt)
        turn.begin()
        sampling = SamplingParams(max_tokens=3, seed=1)
        request = EngineRequest("r", prompt, sampling, 0, "", 0, turn=turn, caller=A)
        mailbox = world.fleet.start([request])
        assert mailbox.routes[0].reason is reason
        assert queues_of(world.fleet).slots.usage(A).num_running == 1
        (inflight,) = mailbox.inflights
        inflight.tokens([7])
        replica = world.replicas["a"]
        replica.turn_ended(world.handle(replica, inflight), Finish(FinishReason.LENGTH))
        turn.add([7], FinishReason.LENGTH, None)
        turn.end()
    assert queues_of(world.fleet).slots.usage(A).num_running == 0


async def test_sessions_are_bounded_and_belong_to_their_tenant(model: Path) -> None:
    others = [f"other-{number}" for number in range(9)]
    settings = {"api_keys": ("one", "two", *others), "max_client_sessions": 10}
    async with serving(model, FakeScheduler(), **settings) as served:

        async def opened(key: str) -> tuple[int, str]:
            answer = await served.http.post("/v1/sessions", json={}, headers=bearer(key))
            body = answer.json()
            is_open = answer.status_code == 200
            return answer.status_code, body["id"] if is_open else body["error"]["code"]

        async def turn(key: str) -> int:
            body = {"prompt": "hello", "session": first, "max_tokens": 2}
            answer = await served.http.post("/v1/completions", json=body, headers=bearer(key))
            return answer.status_code

        _, first = await opened("one")
        assert (await opened("one"))[0] == 200
        assert await opened("one") == (429, "too_many_sessions")
        assert (await turn("two"), await turn("one")) == (404, 200)
        for other in others[:8]:
            assert (await opened(other))[0] == 200
        assert await opened(others[8]) == (503, "too_many_sessions")


async def test_every_request_to_a_model_counts_towards_the_limits(
    model: Path, tmp_path: Path
) -> None:
    ring = FileKeyring(tmp_path / "keys.json")
    key = await ring.add(TenantRecord("acme", requests_per_minute=1, tokens_per_minute=100))
    async with serving(model, api_key_file=ring.path) as served:
        document = (await served.http.get("/openapi.json")).json()
        limited = {
            path
            for path, operations in document["paths"].items()
            if "x-ratelimit-limit-requests"
            in operations.get("post", {}).get("responses", {}).get("200", {}).get("headers", {})
        }
        assert limited == LIMITED
        body = {"prompt": "a", "max_tokens": 4}
        answer = await served.http.post("/v1/completions", json=body, headers=bearer(key))
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        assert 90 <= int(answer.headers["x-ratelimit-remaining-tokens"]) < 100
        for path in LIMITED:
            answer = await served.http.post(path, json={}, headers=bearer(key))
            assert answer.status_code == 429, path


@pytest.mark.parametrize("key", ["right", "wrong"])
async def test_seconds_of_hostility_with_keys_leave_nothing(model: Path, key: str) -> None:
    await leave_nothing(model, key)
