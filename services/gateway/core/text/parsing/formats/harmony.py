"""gpt-oss's harmony format: messages with a header, which names the message's channel."""

import re

from services.gateway.core.text.parsing.reader import Reader, Reading
from services.gateway.core.text.parsing.sink import Sink

_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_CONSTRAIN = "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_MARKS = (_CHANNEL, _MESSAGE, _START, *_ENDS, _CONSTRAIN)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def read_harmony(reader: Reader, sink: Sink) -> Reading[None]:
    """Reads messages. A message with a recipient is a call. Otherwise, a message in the channel
    `analysis` is reasoning, and messages in the channels `final` and `commentary` are content.
    """
    yield from reader.starts_with(_START)
    while not (yield from _is_at_end(reader)):
        header, marker = yield from reader.text_until((_MESSAGE,))
        if not marker:
            return
        recipient = _RECIPIENT.search(header.partition(_CONSTRAIN)[0])
        if recipient is not None:
            sink.call(recipient[1])
            take = sink.arguments
        elif _channel(header) == "analysis":
            sink.begin_reasoning()
            take = sink.reasoning
        else:
            take = sink.content
        marker = yield from reader.until((*_ENDS, _START), take)
        if sink.in_reasoning:
            sink.end_reasoning()
        if marker in _ENDS:
            yield from reader.skip_space()
            yield from reader.starts_with(_START)


def open_message(prompt: str) -> str:
    """Returns the start of the unfinished message at the prompt's end, which the answer
    continues.
    """
    _, start, message = prompt.rpartition(_START)
    return message if start else ""


def _is_at_end(reader: Reader) -> Reading[bool]:
    return not (yield from reader.peek(1))


def _channel(header: str) -> str:
    _, _, rest = header.partition(_CHANNEL)
    return rest.split(maxsplit=1)[0] if rest.split() else ""
