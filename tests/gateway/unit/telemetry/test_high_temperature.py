"""The gateway logs, once, that a request's temperature is so high that its answer is random."""

import pytest

from services.common.request.sampling import SamplingParams
from services.gateway.adapters.telemetry.high_temperature import noted, warn_once


def test_the_first_high_temperature_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    for temperature in (0.0, 2.0, 9.0, 100.0):
        sampling = SamplingParams(temperature=temperature)
        assert noted(sampling) is sampling
    assert [record.getMessage() for record in caplog.records] == [
        "a request has a temperature above 2, which makes answers almost random; further such "
        "requests are not logged"
    ]
