"""Installs the packages that pyproject.toml requires for an image, in the versions of
requirements.lock.

    python3 packages.py list NAME...            writes the requirements, one to a line

A NAME is an extra of the project, `services` for the packages that every service needs, or `build`
for the packages that generate code from protos/ and build the project's wheel. The program must run
in the directory of pyproject.toml.

If /wheelhouse contains wheels, packages are installed only from /wheelhouse, and pip runs from its
own wheel.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

WHEELHOUSE = Path("/wheelhouse")
SERVICES, BUILD = "services", "build"
_GENERATOR = "grpcio-tools"
_DOWNLOADED = ("pip", "async-timeout")
"""Additional packages of a wheelhouse. redis needs async-timeout before Python 3.11.3."""


def main(arguments: list[str]) -> int:
    match arguments:
        case ["list", *names]:
            print("\n".join(requirements(names)))
            return 0
        case ["download", directory, *names]:
            return _pip("download", "--only-binary", ":all:", "--dest", directory, names=names)
        case ["install", directory, *names]:
            return _pip("install", "--no-compile", "--target", directory, names=names)
    print(__doc__, file=sys.stderr)
    return 2


def requirements(names: list[str], pyproject: Path = Path("pyproject.toml")) -> list[str]:
    """The requirements in pyproject.toml of all `names`. Raises KeyError for an unknown name."""
    described = tomllib.loads(pyproject.read_text())
    extras = described["project"]["optional-dependencies"]
    needed = {
        **extras,
        SERVICES: described["project"]["dependencies"],
        BUILD: [
            *described["build-system"]["requires"],
            *(line for line in extras["proto"] if line.startswith(_GENERATOR)),
        ],
    }
    return [line for name in names for line in needed[name]]


def _pip(command: str, *options: str, names: list[str]) -> int:
    """Runs pip for the requirements, and returns its exit status."""
    wheels = sorted(WHEELHOUSE.glob("pip-*.whl"))
    pip = [str(wheels[-1] / "pip")] if wheels else ["-m", "pip"]
    source = ["--no-index", "--find-links", str(WHEELHOUSE)] if wheels else []
    own = _DOWNLOADED if command == "download" else ()
    wanted = ["--constraint", "requirements.lock", *own, *requirements(names)]
    return subprocess.call([sys.executable, *pip, command, *source, *options, *wanted])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
