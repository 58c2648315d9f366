"""Before the load, tests with a few requests which request fields the server accepts."""

from services.cli.bench.adapters.openai_server import CHAT, OpenAIServer
from services.cli.bench.core.record import RequestRecord
from services.cli.bench.core.session import Conversation, Message, Turn
from services.cli.bench.core.vocabulary import BY_USAGE, WORDS, Vocabulary
from services.cli.errors import CommandError

OPTIONAL_FIELDS = ("min_tokens", "ignore_eos", "stream_usage")
"""Optional fields of RequestForm, in the order in which they are dropped."""

_OUTPUT_LEN = 2
_REFUSED = ("http 400", "http 422")
_SHORT_WORDS, _LONG_WORDS = 32, 160


async def fit_form(server: OpenAIServer) -> list[str]:
    """Returns the optional fields that the server rejects. Raises CommandError."""
    left = [name for name in OPTIONAL_FIELDS if getattr(server.form, name)]
    given_up: list[str] = []
    while True:
        failure = (await _ask(server, 1)).failure
        if failure is None:
            return given_up
        if failure.kind not in _REFUSED or not left:
            raise CommandError(f"a first request failed: {failure.kind}: {failure.message}")
        given_up.append(left.pop(0))
        server.reform(**{given_up[-1]: False})


async def vocabulary_by_usage(server: OpenAIServer) -> Vocabulary:
    """Estimates the tokens per word from the `usage` of two prompts. Raises CommandError."""
    short = (await _ask(server, _SHORT_WORDS)).num_input_tokens
    long = (await _ask(server, _LONG_WORDS)).num_input_tokens
    if short is None or long is None or long <= short:
        raise CommandError(
            "the server has no /tokenize and reports no usage: give --tokenizer DIRECTORY"
        )
    return Vocabulary(WORDS, (long - short) / (_LONG_WORDS - _SHORT_WORDS), BY_USAGE)


async def _ask(server: OpenAIServer, num_words: int) -> RequestRecord:
    record = RequestRecord(0, 0, 0, is_warmup=True, intended=0.0, output_len=_OUTPUT_LEN)
    text = " ".join(WORDS[:num_words])
    conversation = Conversation(is_chat=server.form.api == CHAT)
    fields = conversation.ask(Turn((Message("user", text),), _OUTPUT_LEN))
    await server.send(server.encode(fields, _OUTPUT_LEN), record, keep_answer=False)
    return record
