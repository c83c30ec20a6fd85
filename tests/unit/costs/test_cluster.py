"""Clusters: presets, JSON there and back, and descriptions that contradict themselves."""

import json
import threading
import time
from dataclasses import replace

import pytest

from seqpar.balance import Cluster, Link
from seqpar.costs.devices import NODES
from seqpar.costs.profile import machine
from tests.support.synthetic_device import made_profile


@pytest.mark.parametrize(
    ("name", "ranks", "nics", "inside", "between"),
    [
        ("1x1-h100", 1, 1, 0.65 * 450e9, 0.9 * 50e9),
        ("4x8-h100", 32, 8, 0.65 * 450e9, 0.9 * 50e9),
        ("2x8-h200", 16, 8, 0.65 * 450e9, 0.9 * 50e9),
        ("3x8-a100", 24, 8, 0.65 * 300e9, 0.9 * 25e9),
        ("8x8-a800", 64, 4, 0.65 * 200e9, 0.9 * 25e9),
        ("8x4-A800", 32, 2, 0.65 * 200e9, 0.9 * 25e9),
        ("1536x8-h800", 12288, 8, 0.65 * 200e9, 0.9 * 50e9),
    ],
)
def test_presets(name, ranks, nics, inside, between):
    cluster = Cluster.preset(name)
    assert (cluster.ranks, cluster.nics) == (ranks, nics)
    assert (cluster.inside.rate, cluster.between.rate) == (inside, between)
    assert cluster.device.name == name.split("-")[1].upper()
    assert cluster.name == name.lower()


@pytest.mark.parametrize(
    "name",
    ["4x8-b200", "h100", "4x9-h100", "0x8-h100", "4x0-h100", "4x8-h100x", "4x8-h100\n", "", None],
)
def test_presets_that_there_are_not(name):
    with pytest.raises(ValueError, match=r"preset|nodes"):
        Cluster.preset(name)


@pytest.mark.parametrize("kind", NODES)
def test_json_there_and_back(kind, tmp_path):
    cluster = replace(Cluster.preset(f"4x8-{kind}"), name="mine", measured={"samples": [1.5]})
    text = cluster.to_json(tmp_path / "cluster.json")
    assert text == cluster.to_json() == (tmp_path / "cluster.json").read_text()
    assert [file.name for file in tmp_path.iterdir()] == ["cluster.json"]
    read = Cluster.from_json(tmp_path / "cluster.json")
    assert read == cluster
    assert read.measured == {"samples": [1.5]}
    assert read != replace(cluster, nodes=5)


def edited(tmp_path, **changes):
    """A cluster's file with some fields changed, or left out where they are ...; "a.b" is in a."""
    path = tmp_path / "cluster.json"
    Cluster.preset("4x8-h100").to_json(path)
    values = json.loads(path.read_text())
    for name, value in changes.items():
        *outer, last = name.split("__")
        target = values
        for key in outer:
            target = target[key]
        if value is ...:
            del target[last]
        else:
            target[last] = value
    path.write_text(json.dumps(values))
    return path


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"version": 2}, "version must be 1, got 2"),
        ({"version": ...}, "version"),
        ({"format": "seqpar.plan"}, "format"),
        ({"nodes": 0}, "nodes"),
        ({"nodes": "four"}, "nodes"),
        ({"nodes": ...}, "nodes"),
        ({"devices_per_node": 0}, "devices_per_node"),
        ({"devices_per_node": [8, 8, 8, 4]}, "devices_per_node must be one value"),
        ({"device": [{}, {}]}, "device must be one value"),
        ({"device": "H100"}, "device"),
        ({"ranks": 31}, "ranks must be nodes"),
        ({"nics": 0}, "nics"),
        ({"inside__rate": 0}, "inside: rate"),
        ({"inside__latency": -1e-6}, "latency"),
        ({"between": ...}, "between"),
        ({"between__speed": 1}, "speed"),
        ({"device__memory": 0}, "device: memory"),
        ({"device__matmul_rate": float("inf")}, "device: matmul_rate"),
        ({"device__matmul_share": 1.5}, "device: matmul_share"),
        ({"device__dtype": "int8"}, "device: dtype"),
        ({"device__attention": ...}, r"device\.attention"),
        ({"device__attention__forward": [[1.0]]}, "attention: forward"),
        ({"device__attention__rows": ["a", "b", "c", "d"]}, "attention: "),
        ({"device__attention__call": [0.0]}, "attention: call"),
        ({"device__recurrent__token": [0, 1]}, "recurrent: token"),
        ({"device__recurrent__token": [1]}, "recurrent: token"),
        ({"overlaps": "no"}, "overlaps"),
        ({"racks": 2}, "racks"),
        ({"name": None}, "name"),
        ({"device__name": 7}, "device: name"),
        ({"measured": []}, "measured"),
        ({"measured": "x"}, "measured"),
        ({"device__attention__call": [0.0, float("nan")]}, "attention: call"),
        ({"device__attention__fused": "no"}, "attention: fused"),
    ],
)
def test_a_wrong_file_is_refused_naming_the_value(tmp_path, changes, named):
    path = edited(tmp_path, **changes)
    with pytest.raises(ValueError, match=named) as refusal:
        Cluster.from_json(path)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize("text", ["{", "[]", "3", "[" * 100_000])
def test_a_file_that_is_no_description_is_refused(tmp_path, text):
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError, match=r"JSON|format"):
        Cluster.from_json(tmp_path / "file")


def test_a_link_takes_its_latency_and_its_rate():
    link = Link(1e-5, 1e9)
    assert link.seconds(0) == 0
    assert link.seconds(10**6) == pytest.approx(1.01e-3)


def test_this_machine_is_measured_once_and_cached(tmp_path, monkeypatch):
    runs = []

    def measure():
        runs.append(1)
        return made_profile()

    monkeypatch.setattr(machine, "profile", measure)
    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path / "cache"))
    first, second = Cluster.here(), Cluster.here()
    assert runs == [1] and first == second
    assert (first.nodes, first.ranks) == (1, 2)
    assert first.measured["samples"] == made_profile()["samples"]
    Cluster.here(refresh=True)
    assert runs == [1, 1]
    (kept,) = (tmp_path / "cache").iterdir()
    assert kept.name == f"cluster-{machine.machine()}.json" and Cluster.from_json(kept) == first
    Cluster.here(tmp_path / "other.json")
    assert (tmp_path / "other.json").exists() and runs == [1, 1, 1]


def kept_here(tmp_path, monkeypatch):
    """Where this machine's profile is kept, and a list that grows with each measurement."""
    runs = []
    monkeypatch.setattr(machine, "profile", lambda: runs.append(1) or made_profile())
    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / f"cluster-{machine.machine()}.json", runs


@pytest.mark.parametrize("cut", [0, 1, 100, -3])
def test_a_truncated_profile_is_measured_again(cut, tmp_path, monkeypatch, caplog):
    path, runs = kept_here(tmp_path, monkeypatch)
    first = Cluster.here()
    path.write_text(path.read_text()[:cut])
    assert Cluster.here() == first and runs == [1, 1]
    assert "this machine is measured again" in caplog.text
    assert Cluster.here() == first and runs == [1, 1]


def test_another_machines_profile_is_measured_again(tmp_path, monkeypatch, caplog):
    path, runs = kept_here(tmp_path, monkeypatch)
    other = replace(Cluster.here(), measured={"environment": {"device": "another"}})
    other.to_json(path)
    Cluster.here()
    assert runs == [1, 1] and "is of a different device: synthetic" in caplog.text


@pytest.mark.parametrize("folder", ["/dev/null/seqpar", "/proc/seqpar", "~nobody-here/seqpar"])
def test_an_unwritable_folder_keeps_nothing(folder, tmp_path, monkeypatch, caplog):
    _, runs = kept_here(tmp_path, monkeypatch)
    monkeypatch.setenv("SEQPAR_CACHE", folder)
    assert Cluster.here().device.name == "synthetic" and runs == [1]
    assert "the profile of this machine is not kept" in caplog.text
    assert "SEQPAR_CACHE" in caplog.text


def test_of_two_at_a_time_one_measures(tmp_path, monkeypatch):
    path, runs = kept_here(tmp_path, monkeypatch)
    entered = threading.Event()

    def slow():
        runs.append(1)
        entered.set()
        time.sleep(0.5)
        return made_profile()

    monkeypatch.setattr(machine, "profile", slow)
    clusters = []
    first = threading.Thread(target=lambda: clusters.append(Cluster.here()))
    first.start()
    entered.wait()
    clusters.append(Cluster.here())
    first.join()
    assert clusters[0] == clusters[1] and runs == [1] and path.exists()


def test_a_machine_can_be_assumed(tmp_path):
    cluster = Cluster.assumed()
    assert (cluster.name, cluster.ranks) == ("assumed", machine.devices())
    assert Cluster.from_text(cluster.to_json()) == cluster
