"""The images have the properties that their documentation promises."""

import json
import re
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml

from tests.deploy.dockerfiles import (
    ROOT,
    SERVICES,
    TARGETS,
    WORKER,
    environment_of,
    instructions_of,
    packages_in,
    stages_of,
)

PROBE = ROOT / "deploy" / "docker" / "probe.sh"
_BINARIES = Path(sys.executable).parent


def requirements(names: list[str]) -> list[str]:
    """The packages that deploy/docker/packages.py installs for `names`."""
    spec = spec_from_file_location("packages", ROOT / "deploy" / "docker" / "packages.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    listed: list[str] = module.requirements(names, ROOT / "pyproject.toml")
    return listed


@pytest.mark.parametrize("path", [SERVICES, WORKER], ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    hadolint = shutil.which("hadolint", path=str(_BINARIES)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    checked = subprocess.run([hadolint, str(path)], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout) == (0, "")


@pytest.mark.parametrize("image", TARGETS)
def test_an_image_runs_as_a_numbered_user_that_is_not_root(image: str) -> None:
    assert instructions_of(image, "USER")[-1] == "10001:10001"


@pytest.mark.parametrize("image", TARGETS)
def test_an_image_starts_its_service_and_asks_for_its_health(image: str) -> None:
    service = image.partition("-")[0]
    (entrypoint,) = instructions_of(image, "ENTRYPOINT")
    assert json.loads(entrypoint) == ["python3", "-m", f"services.{service}"]
    (health,) = instructions_of(image, "HEALTHCHECK")
    assert json.loads(health.partition("CMD ")[2]) == ["sh", "/probe.sh"]
    assert "deploy/docker/probe.sh /" in instructions_of(image, "COPY")
    environ, prefix = environment_of(image), f"STEPWELL_{service.upper()}_"
    assert f"file=${{1:-{environ[prefix + 'HEALTH_FILE']}}}" in PROBE.read_text()
    # Other containers reach the service only if it listens on all interfaces.
    assert environ[f"{prefix}ADDRESS"].startswith("0.0.0.0:")


@pytest.mark.parametrize("image", TARGETS)
def test_a_probe_that_gets_no_processor_is_not_followed_by_another(image: str) -> None:
    """The Docker engine starts the next probe after the end or the timeout of the last one. With a
    long timeout, probes that get no processor do not pile up.
    """
    (health,) = instructions_of(image, "HEALTHCHECK")
    assert "--timeout=60s" in health


@pytest.mark.parametrize("image", TARGETS)
def test_an_image_exposes_the_ports_that_it_listens_on(image: str) -> None:
    values = [v for k, v in environment_of(image).items() if k.endswith("ADDRESS")]
    exposed = {port for text in instructions_of(image, "EXPOSE") for port in text.split()}
    assert exposed == {value.rpartition(":")[2] for value in values}


def test_make_tags_every_image_as_it_is_told() -> None:
    command = ["make", "--dry-run", "images", "TAG=next"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "for image in gateway scheduler kvpool;" in told
    assert re.findall(r"--tag (\S+)", told) == ["stepwell/$image:next", "stepwell/worker:next"]


def test_images_have_what_their_services_import_and_no_more() -> None:
    packages = {image: packages_in(image) for image in TARGETS}
    assert packages == {
        "gateway": ["services", "gateway", "redis", "tls", "cli"],
        "scheduler": ["services", "redis", "tls", "ecosystem"],
        "kvpool": ["services", "redis", "tls", "ecosystem"],
        "worker": ["services", "worker", "tls"],
        "worker-cuda": ["services", "worker", "gpu", "tls"],
    }
    for image, names in packages.items():
        listed = {re.split(r"[=<>\[; ]", line)[0] for line in requirements(names)}
        assert ("torch" in listed) == image.startswith("worker")
        assert "grpcio" in listed
        downloads = image == "gateway" or image.startswith("worker")
        assert ("huggingface-hub" in listed) == downloads


def test_the_wheelhouse_has_the_packages_of_all_images_but_that_for_gpus() -> None:
    made = (ROOT / "Makefile").read_text().partition("packages.py download ")[2]
    downloaded = made.replace("\\\n", " ").partition("\n")[0].split()[1:]
    wanted = {name for image in TARGETS if image != "worker-cuda" for name in packages_in(image)}
    assert set(downloaded) == wanted | {"build"}


def test_code_is_generated_by_the_version_that_the_project_pins() -> None:
    listed = requirements(["build"])
    assert [line.partition("==")[0] for line in listed] == ["hatchling", "grpcio-tools"]


def test_both_dockerfiles_and_compose_have_the_same_pinned_base() -> None:
    bases = {
        re.findall(r"^ARG BASE=(\S+)$", path.read_text(), re.MULTILINE)[0]
        for path in (SERVICES, WORKER)
    }
    (base,) = bases
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", base)
    services = yaml.safe_load((ROOT / "deploy/compose/services.yaml").read_text())["services"]
    built = [service["build"] for service in services.values() if "build" in service]
    assert {build["args"]["BASE"] for build in built} == {f"${{BASE:-{base}}}"}


def test_what_is_copied_is_sent_to_the_engine() -> None:
    allowed = [
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    for path in (SERVICES, WORKER):
        for stage in stages_of(path).values():
            for text in stage.all("COPY"):
                if text.startswith("--from="):
                    continue
                for source in text.split()[:-1]:
                    assert (ROOT / source).exists(), source
                    assert any((source + "/").startswith(name + "/") for name in allowed), source


def test_what_the_services_link_to_is_copied_to_the_same_place() -> None:
    linked = {
        str(path.resolve().relative_to(ROOT))
        for path in (ROOT / "services").rglob("*")
        if path.is_symlink()
    }
    assert linked == {"deploy/prometheus/rules"}
    for path in (SERVICES, WORKER):
        assert {f"{each} {each}" for each in linked} <= {*stages_of(path)["code"].all("COPY")}


def test_kernels_are_compiled_by_the_files_that_are_copied_for_it(tmp_path: Path) -> None:
    stage = stages_of(WORKER)["kernels"]
    for text in stage.all("COPY"):
        *sources, to = text.split()
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / to)
            else:
                (tmp_path / to).mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, tmp_path / to)
    (command,) = [text for text in stage.all("RUN") if text.startswith("python3 -m ")]
    module = command.split()[2]
    subprocess.run([sys.executable, "-S", "-c", f"import {module}"], cwd=tmp_path, check=True)
