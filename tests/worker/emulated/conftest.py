"""Fixtures of the native kernels for ARM in an emulated process."""

from collections.abc import Iterator

import pytest

from services.worker.backends.native.prebuilt import ARM_KINDS
from tests.worker.emulated.arm import EmulatedLibrary, compiled_for, require_tools

TESTED = (ARM_KINDS[0], ARM_KINDS[-1])
"""The kinds of ARM processors with the most and with the fewest special instructions."""


@pytest.fixture(scope="session", params=TESTED, ids=[kind.name for kind in TESTED])
def arm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmulatedLibrary]:
    """The emulated library. Skips the test if it cannot be cross-compiled or emulated."""
    require_tools()
    scratch = tmp_path_factory.mktemp(request.param.name)
    library = EmulatedLibrary(compiled_for(request.param), scratch)
    yield library
    library.close()
