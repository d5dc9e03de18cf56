"""Where the cgroups of this process are, of either version, and what their files say."""

from collections.abc import Iterator
from pathlib import Path


def cgroup_folders(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroup of either version, and of those around it.

    Of version 1 those of `controller`; `root` holds proc and sys.
    """
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, own = line.split(":", 2)
        kind = controller if controller in controllers.split(",") else controllers
        if kind not in ("", controller):
            continue
        for mount in _mounts(root, kind):
            # In a container the path may be one of the host, of which only the end is seen.
            for folder in (mount / own.lstrip("/"), *(mount / own.lstrip("/")).parents):
                if not folder.is_relative_to(mount):
                    break
                yield folder


def _mounts(root: Path, kind: str) -> list[Path]:
    """Return where the hierarchy of a kind may be; version 2 lies elsewhere beside version 1."""
    base = root / "sys/fs/cgroup"
    return [base / kind] if kind else [base, base / "unified"]


def read(path: Path) -> str:
    """Return the text of a file without the space around it, "" where it can't be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
