"""The table of architectures in the documentation is the list of what is tested."""

from pathlib import Path

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from services.worker.models.architecture import TRAITS, Architecture
from tests.tiny_models import TINY_MODELS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def rows() -> list[list[str]]:
    """Cells of the table, without marks of code."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines
    ]


def test_every_kind_is_in_the_row_of_its_architecture() -> None:
    listed = {kind: name for name, _, kinds, _ in rows() for kind in kinds.split()}
    assert listed == {
        kind: MODEL_FOR_CAUSAL_LM_MAPPING[type(model.config)].__name__
        for kind, model in TINY_MODELS.items()
    }


def test_what_is_native_is_said_to_be() -> None:
    native = {architecture.value for architecture in Architecture}
    assert {name for name, run_by, _, _ in rows() if run_by == "native"} == native
    assert len({name for name, *_ in rows()}) == len(rows())
    assert {architecture.value for architecture in TRAITS} == native
