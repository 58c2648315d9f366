"""`stepwell complete`: continues a text, and prints it token by token."""

import sys
from collections.abc import Sequence

from services.cli.arguments import ClientParser, add_sampling, client_of, sampling_body
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
            **sampling_body(arguments),
        }
        if arguments.echo:
            print(prompt, end="", flush=True)
        for event in client.stream("/v1/completions", body):
            for choice in event.get("choices", []):
                print(choice.get("text", ""), end="", flush=True)
    print()
    return 0
