"""Proposers whose drafts are always right, never right, or random."""

from collections.abc import Sequence

import numpy as np

from services.worker.backends.arrays import Int32Array
from tests.tiny_models import VOCAB_SIZE


class _WithoutState:
    def forget(self, row: int) -> None: ...

    def clear(self) -> None: ...


class KnownProposer(_WithoutState):
    """Proposes the continuations of the given sequences, each of which is a prompt with its output.
    `shift` is added to each draft token, so that with a shift other than 0 no draft is right.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], shift: int = 0) -> None:
        self.sequences = [list(sequence) for sequence in sequences]
        self._shift = shift
        self.num_proposed = 0

    def propose(self, row: int, token_ids: Int32Array, most: int) -> Sequence[int]:
        del row
        known = token_ids.tolist()
        for sequence in self.sequences:
            if sequence[: len(known)] == known and len(sequence) > len(known):
                drafts = sequence[len(known) : len(known) + most]
                self.num_proposed += len(drafts)
                return [(token + self._shift) % VOCAB_SIZE for token in drafts]
        return ()


class RandomProposer(_WithoutState):
    """Proposes a random number of random tokens, and sometimes the right tokens. Equal tokens of a
    request lead to equal drafts.
    """

    def __init__(self, known: KnownProposer) -> None:
        self._known = known

    def propose(self, row: int, token_ids: Int32Array, most: int) -> Sequence[int]:
        random = np.random.default_rng(token_ids)
        drafts = np.array(self._known.propose(row, token_ids, most), np.int32)
        drafts = drafts[: random.integers(0, most + 1)]
        wrong = random.random(len(drafts)) < 0.3
        return np.where(wrong, random.integers(3, VOCAB_SIZE, len(drafts)), drafts).tolist()
