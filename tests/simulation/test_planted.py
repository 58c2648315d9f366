"""Each defect of the folder `planted` fits its source once, and `stepwell explore` finds one of
them with its first seed.
"""

import pytest

from tests.simulation.planted.__main__ import Finding, find
from tests.simulation.planted.defects import ROOT, Defect, all_defects

DEFECTS = {defect.name: defect for defect in all_defects()}


@pytest.mark.parametrize("defect", DEFECTS.values(), ids=DEFECTS)
def test_a_defect_fits_its_source_once(defect: Defect) -> None:
    source = (ROOT / defect.path).read_text()
    assert source.count(defect.before) == 1
    compile(source.replace(defect.before, defect.after), defect.path, "exec")


def test_the_first_seed_finds_a_defect() -> None:
    finding = Finding()
    find(DEFECTS["table-of-earlier-request"], finding, range(1))
    assert finding.seed == 0
