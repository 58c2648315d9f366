"""`stepwell chat`: a conversation, in the terminal or through a pipe."""

import argparse
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing, suppress
from importlib import import_module
from typing import Any

from services.cli.arguments import ClientParser, add_sampling, client_of, sampling_body
from services.cli.client import Client, shown
from services.cli.errors import CommandError

_WELCOME = "Talking with {model}. /reset forgets the conversation, /quit or Ctrl-D leaves,"
_WELCOME_MORE = "Ctrl-C stops an answer."
_PROMPT = "> "


def main(argv: Sequence[str]) -> int:
    arguments = _parse(argv)
    with client_of(arguments) as client:
        model = arguments.model or client.default_model()
        conversation = Conversation(client, model, sampling_body(arguments), arguments.system)
        if arguments.message is not None:
            _print_answer(conversation.ask(arguments.message))
        elif sys.stdin.isatty():
            _converse(conversation)
        else:
            _answer_each_line(conversation)
    return 0


class Conversation:
    """The messages so far. A turn that fails or is interrupted before any output is dropped."""

    def __init__(
        self, client: Client, model: str, sampling: dict[str, Any], system: str | None
    ) -> None:
        self.model = model
        self._client = client
        self._sampling = sampling
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*self._beginning, *self._turns]

    def reset(self) -> None:
        """Deletes all messages except the system message."""
        self._turns.clear()

    def ask(self, message: str) -> Generator[str, None, None]:
        """Yields the response in pieces. The received pieces become part of the conversation."""
        question = {"role": "user", "content": message}
        body = {
            "model": self.model,
            "messages": [*self.messages, question],
            "stream": True,
            **self._sampling,
        }
        answer = ""
        try:
            with closing(self._client.stream("/v1/chat/completions", body)) as events:
                for event in events:
                    for choice in event.get("choices", []):
                        piece = choice.get("delta", {}).get("content") or ""
                        answer += piece
                        yield piece
        finally:
            if answer:
                self._turns += [question, {"role": "assistant", "content": answer}]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ClientParser("chat", "Talks with a model.")
    parser.add_argument(
        "message",
        nargs="?",
        help="one message; without it a conversation, or one message a line from a pipe",
    )
    parser.add_argument("--system", help="system message before the conversation")
    add_sampling(parser)
    return parser.parse_args(argv)


def _answer_each_line(conversation: Conversation) -> None:
    for line in sys.stdin:
        match line.strip():
            case "":
                continue
            case "/quit":
                return
            case "/reset":
                conversation.reset()
            case message:
                _print_answer(conversation.ask(message))


def _print_answer(pieces: Iterable[str]) -> None:
    for piece in pieces:
        print(shown(piece), end="", flush=True)
    print(flush=True)


def _converse(conversation: Conversation) -> None:
    with suppress(ImportError):  # readline adds line editing and history to input()
        import_module("readline")
    print(_WELCOME.format(model=conversation.model), _WELCOME_MORE)
    while (message := _read_message()) is not None:
        if message == "/quit":
            return
        if message == "/reset":
            conversation.reset()
            print("The conversation is forgotten.")
        elif message.startswith("/"):
            print(f"There is no command {message.split()[0]}; there are /reset and /quit.")
        elif message:
            _answer(conversation, message)


def _answer(conversation: Conversation, message: str) -> None:
    with closing(conversation.ask(message)) as pieces:
        try:
            _print_answer(pieces)
        except KeyboardInterrupt:
            print(" (stopped)")
        except CommandError as error:
            print(error.sentence)


def _read_message() -> str | None:
    """Returns a line of input, empty text after Ctrl-C, or None at the end of input."""
    try:
        return input(_PROMPT).strip()
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        print()
        return None
