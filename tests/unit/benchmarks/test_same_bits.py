"""The benchmark of the same bits and of 8 bits, in miniature, on real ranks."""

import pytest

from benchmarks.network import emulated
from benchmarks.ranks import same_bits
from tests.support.commands import fork_spawned


@pytest.mark.exhaustive
def test_it_checks_and_times_all_contenders(monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["same_bits", "--tokens", "1280", "--rounds", "1", "--no-write"]
    )
    fork_spawned(monkeypatch, emulated)
    monkeypatch.setattr(same_bits.harness, "canary", lambda: 1.0)
    same_bits.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line[:28].strip() for line in lines[:-1]] == [
        ", ".join(name) for name in same_bits.NAMES
    ]
