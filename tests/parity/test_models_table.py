"""The table of architectures in the documentation lists exactly the tested architectures."""

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from services.worker.models.architecture import TRAITS, Architecture
from tests.parity.models_table import rows
from tests.tiny_models import TINY_MODELS


def test_every_kind_is_in_the_row_of_its_architecture() -> None:
    listed = {kind: row.architecture for row in rows() for kind in row.kinds}
    assert listed == {
        kind: MODEL_FOR_CAUSAL_LM_MAPPING[type(model.config)].__name__
        for kind, model in TINY_MODELS.items()
    }


def test_what_is_native_is_said_to_be() -> None:
    native = {architecture.value for architecture in Architecture}
    assert {row.architecture for row in rows() if row.run_by == "native"} == native
    assert len({row.architecture for row in rows()}) == len(rows())
    assert {architecture.value for architecture in TRAITS} == native
