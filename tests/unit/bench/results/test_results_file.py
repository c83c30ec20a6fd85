"""Results files: of this machine and these options, or refused; whole whenever a sweep ends."""

import importlib.metadata
import json

import pytest

from seqpar.bench.results.results_file import NAME, SweepResults, alone
from seqpar.bench.workloads import contenders
from tests.support.sweeps import options


@pytest.fixture
def written(tmp_path):
    results = SweepResults.open(tmp_path, options())
    results.row(options().workloads()[0], "ring")["seconds"].append(1.0)
    results.write()
    return results


def test_a_row_is_found_again(written, tmp_path):
    again = SweepResults.open(tmp_path, options())
    assert again.row(options().workloads()[0], "ring")["seconds"] == [1.0]
    assert again.content == written.content and [x.name for x in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize(("part", "name", "value", "said"), [
    ("environment", "device", "H900", "of a different machine: device is 'H900' there"),
    ("environment", "cores", 999, "of a different machine: cores is 999"),
    ("environment", "commit", "abc", "of a different machine: commit"),
    ("options", "rounds", 3, "of other options: rounds is 3 there and 2 here"),
    ("options", "masks", ["full"], "of other options: masks"),
])  # fmt: skip
def test_results_of_something_else_are_named(written, tmp_path, part, name, value, said):
    written.content[part][name] = value
    written.write()
    with pytest.raises(ValueError, match=said) as error:
        SweepResults.open(tmp_path, options())
    assert str(tmp_path / NAME) in str(error.value) and "a different --folder" in str(error.value)


def test_results_of_another_peer_version_are_named(tmp_path, monkeypatch):
    """Of one that is measured: others do not matter."""
    versions = {"flash-attn": "2.8", "ring-flash-attn": "0.1"}
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda x: versions.get(x) or real(x))
    monkeypatch.setattr(contenders, "lacking", lambda name: None)
    with_peer, without = options(peers=["ring-flash-attn"]), options()
    for asked, folder in ((with_peer, tmp_path / "a"), (without, tmp_path / "b")):
        folder.mkdir()
        SweepResults.open(folder, asked).write()
    found = SweepResults.open(tmp_path / "a", with_peer).content["environment"]["versions"]
    assert versions.items() <= found.items()
    versions["ring-flash-attn"] = "0.2"
    with pytest.raises(ValueError, match="of a different machine: versions is"):
        SweepResults.open(tmp_path / "a", with_peer)
    SweepResults.open(tmp_path / "b", without)


@pytest.mark.parametrize(("text", "said"), [
    ("", "is not JSON"), ("[]", "is not the file of a"), ('{"format": 0}', "is not the file of a"),
    ('{"format": 1}', "has no environment"), ("\ufffe", "is not JSON"),
    ("[" * 100_000, "is not JSON"),
    ('{"format": 1, "environment": {}, "options": {}, "rows": 3}', "has no rows"),
    ('{"format": 1, "environment": {}, "options": {}, "rows": [{}]}', "rows that no sweep has"),
])  # fmt: skip
def test_files_that_are_no_results_are_left_alone(tmp_path, text, said):
    (tmp_path / NAME).write_text(text)
    with pytest.raises(ValueError, match=said):
        SweepResults.open(tmp_path, options())
    assert (tmp_path / NAME).read_text() == text


@pytest.mark.parametrize(("changes", "said"), [
    ({"workload": {}}, "rows that no sweep has"), ({"workload": "x"}, "rows that no sweep has"),
    ({"seconds": None}, "rows that no sweep has"), ({"seconds": ["1"]}, "rows that no sweep has"),
    ({"failed": 1}, "rows that no sweep has"), ({"costs": {}}, "rows that no sweep has"),
    ({"links": {}}, "has no links"), ({"links": ...}, "has no links"),
])  # fmt: skip
def test_damaged_parts_of_results_are_named(written, tmp_path, changes, said):
    part = written.content if "links" in changes else written.rows[0]
    part.update(changes)
    if part.get("links") is ...:
        del part["links"]
    written.write()
    with pytest.raises(ValueError, match=f"^results: .*{said}"):
        SweepResults.open(tmp_path, options())


def places(hosts, device="H100"):
    return [{"host": host, "device": device} for host in hosts]


def test_results_of_other_devices_are_named(written):
    then = places("aabb")
    written.check_places(then, places("ccdd"))  # other hosts alike, as a queue gives them
    for now, said in ((places("aabb", "H200"), "devices is"), (places("aaab"), "first rank of")):
        with pytest.raises(ValueError, match=f"of a different machine: {said}"):
            written.check_places(then, now)


def test_two_sweeps_do_not_write_to_one_folder(tmp_path):
    with (
        alone(tmp_path / "x"),
        pytest.raises(ValueError, match="folder: another sweep writes to"),
        alone(tmp_path / "x"),
    ):
        pass
    with alone(tmp_path / "x"):
        pass


def test_a_folder_that_is_none_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ValueError, match=r"folder: .*file cannot be used"),
        alone(tmp_path / "file"),
    ):
        pass
    (tmp_path / NAME).write_bytes(b"\xff\xff")
    with pytest.raises(ValueError, match="cannot be used"):
        SweepResults.open(tmp_path, options())


def test_a_write_that_breaks_leaves_the_file_whole(written, tmp_path):
    before = (tmp_path / NAME).read_text()
    written.content["rows"].append(object())
    with pytest.raises(TypeError):
        written.write()
    assert (tmp_path / NAME).read_text() == before and json.loads(before)
