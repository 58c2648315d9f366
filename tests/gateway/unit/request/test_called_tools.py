"""The names of the tools that an answer calls are sent to the replica, which retains the request's
KV blocks for the agent's next turn.
"""

import pytest

from services.common.request.finish import Finish, FinishReason
from services.common.request.program import DeclaredProgram
from services.common.request.sampling import SamplingParams
from services.gateway.adapters.tokenizer.hf_tokenizer import HfTokenizer, load_tokenizer
from services.gateway.core.request.generation import Generation
from services.gateway.core.request.identity import Identity
from services.gateway.core.request.request import ClientRequest, EngineRequest, Prompt
from services.gateway.core.text.parsing.catalog import TOOL_FORMATS
from services.gateway.core.text.parsing.output_form import OutputForm
from tests.gateway.fake_fleet import FakeFleet
from tests.gateway.tiny_tokenizer import write_tokenizer

CALL = '<tool_call>{"name": "NAME", "arguments": {}}</tool_call>'
TWO_CALLS = CALL.replace("NAME", "sed") + CALL.replace("NAME", "grep")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("model")))


def tools_sent(tokenizer: HfTokenizer, text: str, *, retains_contexts: bool = True, **fields):
    world = FakeFleet(1)
    world.connect("a", retains_contexts=retains_contexts)
    form = OutputForm(tools=TOOL_FORMATS["hermes"])
    sampling = SamplingParams(max_tokens=1000)
    request = ClientRequest("r", (Prompt([5]),), sampling, output_form=form, **fields)
    sequences = [EngineRequest("r", [5], sampling, 0, "", 0)]
    generation = Generation(request, Identity("r", 0, 0), sequences, tokenizer)
    mailbox = generation.start(world.fleet)
    (inflight,) = world.has("a")
    inflight.tokens(tokenizer._backend.encode(text, add_special_tokens=False).ids)
    generation.accept(mailbox.take())
    if generation.num_open:
        replica = world.replicas["a"]
        replica.finished(world.handle(replica, inflight), Finish(FinishReason.STOP))
        generation.accept(mailbox.take())
    generation.close()
    return list(world.links["a"].tools.values())


def test_the_names_of_the_calls_are_sent_after_the_answer(tokenizer: HfTokenizer) -> None:
    assert tools_sent(tokenizer, CALL.replace("NAME", "sed")) == ["sed"]
    assert tools_sent(tokenizer, TWO_CALLS) == ["grep,sed"]
    assert tools_sent(tokenizer, "no call") == []
    long = "".join(CALL.replace("NAME", f"{number}" * 100) for number in range(4))
    assert [len(name) for name in tools_sent(tokenizer, long)] == [256]


def test_a_stop_string_ends_the_answer_before_its_tool_is_sent(tokenizer: HfTokenizer) -> None:
    text = CALL.replace("NAME", "sed") + " done and more"
    assert tools_sent(tokenizer, text, stop=(" done",)) == ["sed"]


def test_nothing_is_sent_to_a_replica_that_retains_no_contexts(tokenizer: HfTokenizer) -> None:
    assert tools_sent(tokenizer, TWO_CALLS, retains_contexts=False) == []


def test_the_tool_that_the_client_names_is_kept(tokenizer: HfTokenizer) -> None:
    program = DeclaredProgram("job", tool="python")
    assert tools_sent(tokenizer, TWO_CALLS, program=program) == []
