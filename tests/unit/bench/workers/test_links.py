"""The preflight: who exchanges with whom, and which pairs are slow; and where ranks meet."""

import itertools

import pytest
import torch

from seqpar.bench.workers import links
from seqpar.bench.workloads.contenders import grid
from seqpar.comm.launch import LaunchedProcess, first_host, place, store_of
from tests.support.ranks import virtual


@pytest.mark.parametrize("ranks", range(1, 10))
def test_all_pairs_meet_once_without_overlap(ranks):
    found = links.rounds(ranks)
    pairs = [pair for pairs in found for pair in pairs]
    assert sorted(pairs) == sorted(itertools.combinations(range(ranks), 2))
    for pairs in found:
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)
    assert len(found) <= ranks


def test_links_are_measured_once_a_pair(monkeypatch):
    monkeypatch.setitem(links.MESSAGE_BYTES, "cpu", 1024)
    answers = virtual(3, links.measure, torch.device("cpu"))
    found = links.report([links.place(torch.device("cpu"))] * 3, answers)
    assert [pair["ranks"] for pair in found["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    assert all(pair["latency"] > 0 and pair["rate"] > 0 for pair in found["pairs"])
    assert {pair["between"] for pair in found["pairs"]} == {"ranks of a host"}


def test_slow_pairs_are_named_within_their_kind():
    places = [{"host": "ab"[rank // 4], "device": "gpu"} for rank in range(8)]
    answers = []
    for a, b in itertools.combinations(range(8), 2):
        near = places[a]["host"] == places[b]["host"]
        pair = {"latency": 1e-5 if near else 1e-4, "rate": 4e11 if near else 5e10}
        answers.append([pair | {"ranks": [a, b]}])
    assert links.report(places, answers)["slow"] == []
    answers[0][0]["rate"] = 1e11  # fast between hosts, but not on one
    answers[-1][0]["latency"] = 3e-5
    found = links.report(places, answers)["slow"]
    assert found == [
        "ranks 0 and 1: 100.00 GB/s each way, the median is 400.00",
        "ranks 6 and 7: 30 us, the median is 10",
    ]


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE"])
@pytest.mark.parametrize(("ranks", "local", "shape"), [
    (1, "", (1, 1)), (2, "", (1, 2)), (4, "", (2, 2)), (6, "", (2, 3)), (7, "", (1, 7)),
    (16, "8", (2, 8)), (16, "16", (4, 4)), (12, "8", (3, 4)),
    (16, "8(x2)", (2, 8)), (12, "8,4", (3, 4)),
])  # fmt: skip
def test_a_mesh_has_a_host_a_row(monkeypatch, name, ranks, local, shape):
    monkeypatch.setenv(name, local)
    assert grid(ranks) == shape


NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_JOB_ID"),
    "SLURM_STEP_NODELIST",
)
STEP = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "40017", "SLURM_STEP_NODELIST": "gpu[07-08,11]"}  # fmt: skip
RUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "5"}


@pytest.mark.parametrize(("said", "expected"), [
    ({}, None),
    (RUN, LaunchedProcess(0, 2, 0, "n1", 5, True)),
    (RUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, LaunchedProcess(0, 2, 0, "n1", 5, False)),
    (RUN | {"RANK": "1", "LOCAL_RANK": "1"}, LaunchedProcess(1, 2, 1, "n1", 5, False)),
    (STEP, LaunchedProcess(3, 4, 1, "gpu07", 20017, False)),
    (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, None),  # a shell of a job
    ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}, None),  # its batch script
])  # fmt: skip
def test_launchers_say_where_this_process_is(monkeypatch, said, expected):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert place() == expected


def test_what_a_launcher_says_wrong_is_named(monkeypatch):
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="RANK must be an integer, got 'first'"):
        place()


@pytest.mark.parametrize(("nodes", "host"), [
    ("gpu[01-04,07]", "gpu01"), ("a", "a"), ("a,b", "a"), ("n[3,5]-ib,m", "n3-ib"),
    ("x1,y[2-3]", "x1"),
])  # fmt: skip
def test_the_first_host_of_a_list(nodes, host):
    assert first_host(nodes) == host


def test_a_store_of_this_machine_alone():
    store, (host, port) = store_of(None)
    store.set("key", "value")
    assert host == "127.0.0.1" and port > 0 and store.get("key") == b"value"
