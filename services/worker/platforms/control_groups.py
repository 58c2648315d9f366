"""Where the limits of this process's control groups stand, in both of their versions."""

from pathlib import Path


def control_groups(proc: Path, cgroup: Path, controller: str) -> list[Path]:
    """Directories that may hold limits of the controller: the process's group and those around it.

    Within a container the files lie at the root, whatever the group is called outside.
    """
    groups = [cgroup, cgroup / controller]
    for line in read_text(proc / "self/cgroup").splitlines():
        hierarchy, controllers, path = (*line.split(":", 2), "", "")[:3]
        if hierarchy == "0":
            root = cgroup
        elif controller in controllers.split(","):
            root = cgroup / controller
        else:
            continue
        own = root / path.lstrip("/")
        groups += [group for group in (own, *own.parents) if group.is_relative_to(root)]
    return list(dict.fromkeys(groups))


def read_text(path: Path) -> str:
    """A file's text; nothing where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
