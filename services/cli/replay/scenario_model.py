"""What scenarios have in place of a model: the next token is a function of the tokens so far."""


def next_token(tokens: list[int]) -> int:
    """The token after `tokens`."""
    return (sum(tokens[-4:]) * 31 + len(tokens) * 7) % 997 + 3


def continuation(tokens: list[int], count: int) -> list[int]:
    """The next `count` tokens."""
    longer = list(tokens)
    for _ in range(count):
        longer.append(next_token(longer))
    return longer[len(tokens) :]


def proposals(tokens: list[int], count: int) -> list[int]:
    """Drafts made when a request holds `tokens`: about seven in ten right, the others one off."""
    return [
        token if (len(tokens) * 7 + index * 13) % 10 < 7 else token + 1
        for index, token in enumerate(continuation(tokens, count))
    ]
