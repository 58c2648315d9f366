"""The text of a prompt of token ids, for answers that echo it."""

from collections.abc import Sequence

from services.gateway.core.detokenizer import new_detokenizer
from services.gateway.core.ports import Tokenizer


def echoed(tokenizer: Tokenizer, token_ids: Sequence[int]) -> tuple[str, list[int]]:
    """The text of a prompt, special tokens included, and where in it each token starts.

    Offsets count characters; a token that holds a part of one starts where the character does. A
    character that the prompt does not complete is left to the answer, which goes on with it.
    """
    detokenizer = new_detokenizer(tokenizer, (), skip_special_tokens=False)
    pieces, offsets = [], []
    for token in token_ids:
        offsets.append(detokenizer.num_characters)
        pieces.append(detokenizer.feed((token,)))
    pieces.append(detokenizer.flush())
    return "".join(pieces), offsets
