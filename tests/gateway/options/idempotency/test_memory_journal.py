"""The in-memory implementation of the port Journal passes its conformance tests."""

import time

import pytest

from tests.gateway.options.idempotency.journal_conformance import (
    LEASE_SECONDS,
    JournalConformance,
    Journals,
)
from tests.gateway.options.idempotency.memory_journal import MemoryJournal, SharedLogs


class TestMemoryJournal(JournalConformance):
    @pytest.fixture
    def journals(self) -> Journals:
        shared = SharedLogs(time.monotonic, LEASE_SECONDS)
        return MemoryJournal(shared), MemoryJournal(shared)
