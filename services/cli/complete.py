"""`stepwell complete`: continues a text and prints the continuation token by token."""

import sys
from collections.abc import Sequence

from services.cli.arguments import ClientParser, add_sampling, client_of, sampling_body
from services.cli.client import shown
from services.cli.errors import CommandError


def main(argv: Sequence[str]) -> int:
    parser = ClientParser("complete", "Continues a text.")
    parser.add_argument("prompt", nargs="?", help="the text (default: standard input)")
    parser.add_argument("--echo", action="store_true", help="print the prompt first")
    add_sampling(parser)
    arguments = parser.parse_args(argv)
    prompt = sys.stdin.read() if arguments.prompt is None else arguments.prompt
    if not prompt:
        raise CommandError("the prompt is empty")
    with client_of(arguments) as client:
        body = {
            "model": arguments.model or client.default_model(),
            "prompt": prompt,
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampling_body(arguments),
        }
        if arguments.echo:
            print(prompt, end="", flush=True)
        reason, num_tokens = None, None
        for event in client.stream("/v1/completions", body):
            for choice in event.get("choices", []):
                print(shown(choice.get("text", "")), end="", flush=True)
                reason = choice.get("finish_reason") or reason
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    print(flush=True)
    note = why_it_stopped(reason, num_tokens, arguments.max_tokens)
    if note is not None:
        print(note, file=sys.stderr)
    return 0


def why_it_stopped(reason: str | None, num_tokens: int | None, asked: int | None) -> str | None:
    """The line below an output that was cut off, or None. `asked` is the client's max_tokens."""
    if reason != "length":
        return None
    if asked is not None and num_tokens is not None and num_tokens < asked:
        return f"stopped after {num_tokens} tokens, at the server's longest sequence"
    most = num_tokens if asked is None else asked
    return f"stopped at max_tokens{'' if most is None else f' {most}'}; --max-tokens N allows more"
