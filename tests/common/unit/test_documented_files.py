"""Files, modules and links that the documentation names exist."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TOP = ("services", "protos", "tests", "benchmarks", "deploy", "docs", "tools", "models")

# Paths with a placeholder, such as services/<name>/settings.py, are not files.
_PATH = re.compile(rf"`((?:{'|'.join(TOP)})/[\w./-]*)`")
_MODULE = re.compile(r"python (?:-u )?-m ((?:benchmarks|services)[\w.]*)")
_LINK = re.compile(r"\]\(([^)#]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_the_documentation_exist(page: Path) -> None:
    named = _PATH.findall(page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_named_in_the_documentation_exist(page: Path) -> None:
    named = {name.rstrip(".") for name in _MODULE.findall(page.read_text())}
    for name in named - {"services"}:  # services.<name>
        assert find_spec(name) is not None, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_to_files(page: Path) -> None:
    links = [link for link in _LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_architecture_page_names_every_core_it_explains() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for service in ("gateway", "scheduler", "kvpool", "worker"):
        assert f"services/{service}/__main__.py" in text
        assert f"services/{service}/core/" in text


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
