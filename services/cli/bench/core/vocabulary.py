"""The words of prompts and their lengths in tokens. The words are common in English. In most
tokenizers each word is a single token when it follows a space. If tokens can be counted, only words
with exactly one token are used, so that a prompt of n words has n tokens. Otherwise all words are
used, with the average length from the server's `usage`.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

_FREQUENT = """
the of and to in is that it was for on are with as his they at be this from have or by one had not
but what all were when we there can an your which their said if do will each about how up out them
then she many some so these would other into has more her two like him see time could no make than
first been its who now people my made over did down only way find use may water long little very
after words called just where most know get through back much before go good new write our used me
man too any day same right look think also around another came come work three word must because
does part even place well such here take why things help put years different away again off went
old number great tell men say small every found still between name should home big give air line
set own under read last never us left end along while might next sound below saw something thought
both few those always looked show large often together asked house world going want school
important until form food keep children feet land side without boy once animals life enough took
sometimes four head above kind began almost live page got earth need far hand high year mother
light parts country father let night following picture being study second eyes soon times story
boys since white days ever paper hard near sentence better best across during today others however
sure means knew try told young miles sun ways thing whole hear example heard several change answer
room sea against top turned learn point city play toward five using himself usually money seen car
morning given body upon family later turn move face door cut done group true half red fish plants
living wanted black eat short United run book gave order open ground really table remember tree
course front American space inside ago sad early learned class
"""
WORDS = tuple(_FREQUENT.split())
"""Frequent words of written English."""

BY_USAGE = "usage, on average"
"""The source of a vocabulary whose tokens per word are an average from the server's `usage`."""
_FEWEST_WORDS = 32
_SAMPLE_WORDS = 256


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Words, the average number of tokens per word, and the source of that number."""

    words: tuple[str, ...]
    tokens_per_word: float
    source: str

    @property
    def is_exact(self) -> bool:
        """Whether texts have exactly the requested number of tokens."""
        return self.tokens_per_word == 1.0 and self.source != BY_USAGE

    def text(self, draw: random.Random, num_tokens: int) -> str:
        """Random words with `num_tokens` tokens in total, but at least one word."""
        num_words = max(1, round(num_tokens / self.tokens_per_word))
        return " ".join(draw.choices(self.words, k=num_words))


def counted_vocabulary(count_tokens: Callable[[str], int], source: str) -> Vocabulary:
    """Builds a vocabulary of single-token words. The tokenizer must not add special tokens."""
    words = _single_token_words(count_tokens)
    if len(words) < _FEWEST_WORDS:
        words = WORDS
    sample = " ".join(random.Random(0).choices(words, k=_SAMPLE_WORDS))
    return Vocabulary(words, count_tokens(sample) / _SAMPLE_WORDS, source)


def _single_token_words(count_tokens: Callable[[str], int]) -> tuple[str, ...]:
    """Words that are one token after a space: the text of such a word twice has two tokens."""
    if count_tokens(" ".join(WORDS)) == len(WORDS):
        return WORDS
    return tuple(word for word in WORDS if count_tokens(f"{word} {word}") == 2)
