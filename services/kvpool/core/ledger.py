"""Ensures that each transaction is applied only once, although a client may send it twice."""

from typing import Generic, TypeVar

from services.kvpool.core.errors import OutOfSequence, StaleGeneration

Answer = TypeVar("Answer")


class TransactionLedger(Generic[Answer]):
    """Checks the transaction numbers of one generation, which are 1, 2, 3 and so on.

    A client whose stream broke does not know whether its last transaction was applied. It sends
    that transaction again and receives the stored answer.
    """

    __slots__ = ("_answer", "_generation", "_sequence")

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._sequence = 0
        self._answer: Answer | None = None

    def find(self, generation: int, sequence: int) -> Answer | None:
        """Returns the stored answer if the last transaction is repeated, or None for the next one.

        Raises StaleGeneration if `generation` is another generation of the pool, and OutOfSequence
        if `sequence` is any other number.
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
        """Stores the answer to the transaction just applied, replacing the previous answer."""
        self._sequence = sequence
        self._answer = answer
