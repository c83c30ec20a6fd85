"""The memory that a process may use, in containers and under limits."""

import resource

import pytest

from seqpar.core.memory import usable_memory

MACHINE = usable_memory()
GIB = 2**30


def made(root, groups, **files):
    """A root folder in which this process has these groups and these limits."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for path, text in files.items():
        file = root / "sys/fs/cgroup" / path.replace("__", "/").replace("max", "memory.max")
        file = file.with_name(file.name.replace("limit", "memory.limit_in_bytes"))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b\n", {"a__b__max": GIB}, GIB),
        ("0::/a/b\n", {"a__b__max": "max", "a__max": GIB // 2}, GIB // 2),
        ("0::/a/b\n", {"max": GIB}, GIB),
        ("0::/\n", {"max": "max"}, MACHINE),
        ("4:memory,cpu:/a\n0::/\n", {"memory__a__limit": GIB}, GIB),
        ("4:memory:/of/the/host\n", {"memory__limit": GIB}, GIB),
        ("4:memory:/\n", {"memory__limit": 2**63 - 4096}, MACHINE),
        ("4:cpu:/a\n", {"memory__a__limit": GIB}, MACHINE),
        ("", {}, MACHINE),
    ],
)
def test_the_least_limit_of_the_groups_holds(tmp_path, groups, files, expected):
    assert usable_memory(made(tmp_path, groups, **files)) == expected


def test_a_system_without_groups_has_its_memory(tmp_path):
    assert usable_memory(tmp_path) >= MACHINE


def test_the_limit_of_addresses_holds(monkeypatch, tmp_path):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (GIB, GIB))
    assert usable_memory(tmp_path) == GIB
