"""Percentiles, means and standard deviations, compared with numpy's results."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.bench.core.percentiles import PERCENTILES, distribution, percentile

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)


@given(VALUES, st.floats(0, 100))
def test_any_percentile_is_numpys(values: list[float], percent: float) -> None:
    ours = percentile(sorted(values), percent)
    assert ours == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-9)


@given(VALUES)
def test_a_distribution_is_numpys(values: list[float]) -> None:
    found = distribution(values)
    assert found is not None
    assert found.count == len(values)
    assert found.mean == pytest.approx(float(np.mean(values)), rel=1e-9, abs=1e-9)
    assert found.std == pytest.approx(float(np.std(values)), rel=1e-6, abs=1e-6)
    assert (found.min, found.max) == (min(values), max(values))
    assert tuple(found.percentiles) == PERCENTILES


def test_no_values_have_no_distribution() -> None:
    assert distribution([]) is None
