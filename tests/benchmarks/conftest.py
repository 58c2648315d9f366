"""Models for the benchmark programs, created once for each test session."""

from pathlib import Path

import pytest

from benchmarks.common.random_model import Shape, write_model
from tests.e2e.tiny import save_servable_model

TINY = Shape(64, 2, 1, 1, 128, 512, tied_embeddings=True)


@pytest.fixture(scope="session")
def servable_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    save_servable_model(directory)
    return directory


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "random"
    write_model(TINY, directory)
    return directory
