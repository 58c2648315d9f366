"""Transactions are applied once. Only the next one, or the last one again, is accepted."""

import pytest

from services.kvpool.core.errors import OutOfSequence, StaleGeneration
from services.kvpool.core.pool_host import TransactionLedger


def test_the_last_transaction_is_answered_again():
    ledger: TransactionLedger[str] = TransactionLedger(7)
    assert ledger.find(7, 1) is None
    ledger.record(1, "one")
    assert ledger.find(7, 1) == "one"
    assert ledger.find(7, 2) is None
    ledger.record(2, "two")
    assert ledger.find(7, 2) == "two"


@pytest.mark.parametrize("sequence", [0, 1, 4])
def test_any_other_number_is_refused(sequence):
    ledger: TransactionLedger[str] = TransactionLedger(7)
    ledger.record(1, "one")
    ledger.record(2, "two")
    with pytest.raises(OutOfSequence):
        ledger.find(7, sequence)


@pytest.mark.parametrize("generation", [0, 6, 8])
def test_any_other_generation_is_refused(generation):
    with pytest.raises(StaleGeneration):
        TransactionLedger[str](7).find(generation, 1)
