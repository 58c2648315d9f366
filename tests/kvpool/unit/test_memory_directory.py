"""The in-memory implementation of the port Directory passes its conformance tests."""

import pytest

from services.kvpool.adapters.memory_directory import MemoryDirectory
from tests.kvpool.directory_conformance import DirectoryConformance


class TestMemoryDirectory(DirectoryConformance):
    @pytest.fixture
    def directory(self) -> MemoryDirectory:
        return MemoryDirectory()
