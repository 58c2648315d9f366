"""Files, modules and links that the documentation names exist."""

import re
import subprocess
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLES = ("tests/e2e/documented_fields.md", "tests/common/unit/process/documented_flags.md")
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / page for page in EXAMPLES),
]
LINKED = [
    *PAGES,
    ROOT / "models/demo/README.md",
    ROOT / "deploy/helm/stepwell/README.md",
    *sorted((ROOT / "tests").rglob("README.md")),
    *sorted((ROOT / "benchmarks/results").glob("*.md")),
]
TOP = ("services", "protos", "tests", "benchmarks", "deploy", "docs", "tools", "models")

# Paths with a placeholder, such as services/<name>/settings.py, do not match.
_PATH = re.compile(rf"`((?:{'|'.join(TOP)})/[\w./-]*)`")
_MODULE = re.compile(r"python (?:-u )?-m ((?:benchmarks|services)[\w.]*)")
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#{1,6} +(.+?)[ #]*$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_the_documentation_exist(page: Path) -> None:
    named = _PATH.findall(page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_named_in_the_documentation_exist(page: Path) -> None:
    named = {name.rstrip(".") for name in _MODULE.findall(page.read_text())}
    for name in named - {"services"}:  # "services" comes from `services.<name>`
        assert find_spec(name) is not None, name


def test_installing_is_not_silent_and_the_command_is_found_afterwards(tmp_path: Path) -> None:
    """`make run` shows the progress of each installation, and installs the extra `plot`. The README
    describes how the shell finds the command `stepwell`.
    """
    run = ["make", "--dry-run", "--always-make", f"VENV={tmp_path}", "run"]
    recipe = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    installations = re.findall(r"-m pip .*install .*", recipe)
    assert len(installations) == 2
    assert all("--progress-bar on" in one and "--quiet" not in one for one in installations)
    assert re.search(r"\[[\w,]*\bplot\b[\w,]*\]", installations[1])
    assert recipe.index("Installing what serving needs") < recipe.index(installations[0])
    assert "`source .venv/bin/activate` the command `stepwell`" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_to_files_and_headings(page: Path) -> None:
    links = _LINK.findall(_CODE.sub("", page.read_text()))
    relative = [(path, anchor) for path, anchor in links if "://" not in path]
    assert [link for link in relative if not _leads_somewhere(page, *link)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_rows_of_a_table_have_as_many_cells_as_its_head(page: Path) -> None:
    text = _CODE.sub("", page.read_text())
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, line, *rows = table.splitlines()
        assert re.fullmatch(r"[-:| ]+", line), head
        assert {row.count("|") for row in rows} == {head.count("|")}, head


def test_anchors_are_githubs() -> None:
    text = "# Keys `a_b`, [c](d.md) & *e*\n```\n# no heading\n```\n## x-y: é 2.5\n## x-y: é 2.5\n"
    assert _anchors(text) == {"keys-a_b-c--e", "x-y-é-25", "x-y-é-25-1"}


def _leads_somewhere(page: Path, path: str, anchor: str) -> bool:
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in _anchors(target.read_text()))


def _anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to a page's headings: in lower case, without markup and
    punctuation, with hyphens for spaces. The second of equal anchors ends in -1, the third in -2.
    """
    anchors: set[str] = set()
    numbers: Counter[str] = Counter()
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for heading in _HEADING.findall(text):
        visible = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", visible.lower()).replace(" ", "-")
        anchors.add(f"{anchor}-{numbers[anchor]}" if numbers[anchor] else anchor)
        numbers[anchor] += 1
    return anchors


def test_the_architecture_page_names_every_core_it_explains() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for service in ("gateway", "scheduler", "kvpool", "worker"):
        assert f"services/{service}/__main__.py" in text
        assert f"services/{service}/core/" in text


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
