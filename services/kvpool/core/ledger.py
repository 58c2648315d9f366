"""Applies each transaction once: its number is the next, or it is the last one again."""

from typing import Generic, TypeVar

from services.kvpool.core.errors import OutOfSequence, StaleGeneration

Answer = TypeVar("Answer")


class TransactionLedger(Generic[Answer]):
    """The numbers of one generation: 1, then one more each.

    A client whose stream broke does not know whether its last transaction was applied. It sends it
    again, and gets the answer that was kept.
    """

    __slots__ = ("_answer", "_generation", "_sequence")

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._sequence = 0
        self._answer: Answer | None = None

    def find(self, generation: int, sequence: int) -> Answer | None:
        """The kept answer if this is the last transaction again; None if it is the next one.

        Raises StaleGeneration or OutOfSequence if it is neither.
        """
        if generation != self._generation:
            raise StaleGeneration(
                f"generation {generation} is over, this is {self._generation}", field="generation"
            )
        if sequence == self._sequence + 1:
            return None
        if sequence == self._sequence and self._answer is not None:
            return self._answer
        raise OutOfSequence(
            f"transaction {sequence} came after transaction {self._sequence}", field="sequence"
        )

    def record(self, sequence: int, answer: Answer) -> None:
        """Keeps the answer to the transaction that was applied, in place of the one before."""
        self._sequence = sequence
        self._answer = answer
