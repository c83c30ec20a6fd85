"""How much of the host's memory this process may use."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path


def usable_memory(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that this process may use.

    This is the smallest of the machine's memory, the limits of the control groups of this process
    (versions 1 and 2), and RLIMIT_AS (`ulimit -v`). Containers and job schedulers set limits of
    control groups.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_cgroup_limits(root)]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    return min(limits)


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Yield the limits of this process's memory groups, and of the groups that contain them."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container, the path may be that of the host. In this case, only the folder of the
        # mount is visible.
        own = mount / path.strip("/")
        for folder in (own, *own.parents):
            text = _read(folder / name)
            if text.isdecimal():  # version 2 writes "max" where there is no limit
                yield int(text)
            if folder == mount:
                break


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
