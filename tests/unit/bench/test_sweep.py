"""A sweep in miniature: what fails is recorded, what is wrong is not timed, nothing is lost."""

import json

import pytest
import torch

from seqpar.bench import sweep
from seqpar.bench.results.results_file import SweepResults
from seqpar.bench.workers import rank
from seqpar.bench.workers.ranks import PointError, StartError
from seqpar.bench.workloads.contenders import ONE, Contender
from tests.support.sweeps import Here, options


def swept(folder, here, **changes):
    """The rows of a sweep, by contender and tokens."""
    made = options(**changes)
    results, begun = SweepResults.open(folder, made), []
    sweep.run(made, results, here, begun.append)
    assert len(begun) == sweep.steps(made)
    written = json.loads(results.path.read_text())
    assert written == results.content
    return {(row["contender"], row["workload"]["tokens"]): row for row in written["rows"]}


def test_every_point_is_checked_weighed_and_timed(tmp_path):
    masks = ["causal", "prefix-pile"]
    rows = swept(
        tmp_path, Here(), masks=masks, lengths=["40"], passes=["forward", "forward+backward"]
    )
    found = json.loads((tmp_path / "bench.json").read_text())
    assert len(found["rows"]) == 2 * 2 * 2 and {name for name, _ in rows} == {ONE, "ring"}
    for row in found["rows"]:
        assert row["failed"] is None and len(row["seconds"]) == 2 and min(row["seconds"]) > 0
        assert 0 < row["check"]["relative"] < 1e-6 and row["spent"] > sum(row["seconds"])
        assert row["costs"]["bytes"] == [0] and row["costs"]["memory"][0] >= 40 * 8 * 4 * 4
        backward = row["workload"]["passes"] != "forward"
        assert set(row["check"]["errors"]) == {"out", *(["dq", "dk", "dv"] if backward else [])}
    assert found["links"]["places"][0]["device"] == "cpu" and found["links"]["pairs"] == []
    assert found["options"]["masks"] == masks and found["environment"]["versions"]["torch"]


def test_a_failure_has_its_reason_and_sweeping_continues(tmp_path):
    faults = {
        ("check", "ulysses"): PointError("out of memory: 9 GiB"),
        ("costs", "token_ring"): PointError("rank 1 was killed"),
        ("time", "all_gather"): PointError("it took more than 60 s"),
    }
    names = ["ulysses", "token_ring", "all_gather", "ring"]
    here = Here(faults)
    rows = swept(tmp_path, here, strategies=names, lengths=["32", "48"])
    for (name, _), row in rows.items():
        told = [str(error) for (_, failed), error in faults.items() if failed == name]
        assert [row["failed"]] == (told or [None])
    assert len(rows["ring", 48]["seconds"]) == 2
    assert ("time", "token_ring") not in here.requests and here.requests.count(
        ("time", "all_gather")
    ) == 2


def test_a_refusal_is_a_reason(tmp_path):
    rows = swept(tmp_path, Here(), peers=["all-to-all-by-hand"], masks=["window:4"])
    assert rows["all-to-all-by-hand", 32]["failed"].startswith(
        "refused: here it only computes batches"
    )
    assert rows["ring", 32]["failed"] is None


def with_fault(monkeypatch, change):
    """Let Ring's answers be changed."""
    from seqpar.bench.workloads import contenders

    make = contenders.make

    def faulty(name, *arguments):
        made = make(name, *arguments)
        if name != "ring":
            return made
        return Contender(
            made.indices, made.heads, made.kv_heads, lambda *x: change(made.attend(*x))
        )

    monkeypatch.setattr(contenders, "make", faulty)


@pytest.mark.parametrize(("tokens", "dtype", "change", "said"), [
    ("64", "fp32", lambda out: out * (1 + 1e-4), "RMS error of out"),
    ("64", "fp32", lambda out: out.detach() + 1e-9 * out, "RMS error of dq"),
    ("64", "fp32", lambda out: out / 0, "it has NaN or inf"),
    ("1024", "bf16", lambda out: (out * 1.01).bfloat16(), "RMS error of"),
    # of a longer batch: in what is compared of a smaller one, it is right
    ("1040", "fp32", lambda out: out * (1 + 1e-4 * (len(out) == 1040)), "RMS error of out"),
])  # fmt: skip
def test_what_is_wrong_is_not_timed(tmp_path, monkeypatch, tokens, dtype, change, said):
    with_fault(monkeypatch, change)
    monkeypatch.setattr(rank, "MAX_TOKENS_CHECKED", 1024)
    here = Here()
    rows = swept(tmp_path, here, lengths=[tokens], dtype=dtype, rounds=1, peers=["none"],
                 passes=["forward+backward"])  # fmt: skip
    row = rows["ring", int(tokens)]
    assert row["failed"].startswith("wrong, so it was not timed") and said in row["failed"]
    assert ("time", "ring") not in here.requests and row["seconds"] == []
    assert rows[ONE, int(tokens)]["failed"] is None
    assert sweep.faulty([*rows.values()])


def test_a_wrong_peer_is_not_our_fault():
    reason = "wrong, so it was not timed: ..."
    assert not sweep.faulty([{"contender": "ring-flash-attn", "failed": reason}])
    for reason_of_ours in (
        "out of memory: 3 GiB",
        "refused: heads must be 4",
        "it took more than 3 s",
        "rank 1 was killed, as the system does when memory is short",
        "nothing to compare it with: one device failed: out of memory",
        None,
    ):
        assert not sweep.faulty([{"contender": "ring", "failed": reason_of_ours}])
    for reason_of_ours in ("RuntimeError: no", "rank 0 was ended by SIGSEGV", "PeerError: rank 1"):
        assert sweep.faulty([{"contender": "ring", "failed": reason_of_ours}])
    assert sweep.faulty([{"contender": ONE, "failed": reason}])


def test_restart_time_of_ranks_is_not_counted(tmp_path, monkeypatch):
    now = [0.0]

    class Slow(Here):
        def ready(self, ranks):
            now[0] += 1000.0

        def ask(self, *arguments):
            now[0] += 1.0
            return super().ask(*arguments)

    monkeypatch.setattr(sweep.time, "monotonic", lambda: now[0])
    rows = swept(tmp_path, Slow())
    assert all(row["failed"] is None and row["spent"] == 4.0 for row in rows.values())


def test_longer_batches_are_compared_in_some_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(rank, "MAX_TOKENS_CHECKED", 1024)
    rows = swept(tmp_path, Here(), lengths=["1055"], masks=["causal-magi"], rounds=1)
    checked = rows["ring", 1055]["check"]
    assert 0 < checked["spot"] < 1e-6
    assert checked["of_one_device"] <= 1.35


@pytest.mark.parametrize("at", [0, 1, 2, 4, 7, 8])
def test_an_interrupted_sweep_loses_nothing(tmp_path, at):
    class Interrupted(Here):
        def ask(self, *arguments):
            if len(self.requests) == at:
                raise KeyboardInterrupt
            return super().ask(*arguments)

    first, second = Interrupted(), Here()
    with pytest.raises(KeyboardInterrupt):
        swept(tmp_path, first)
    rows = swept(tmp_path, second)
    assert all(len(row["seconds"]) == 2 and not row["failed"] for row in rows.values())
    # where the ranks are, each time; then of both contenders: check, costs, two turns
    assert len(first.requests) + len(second.requests) == (at > 0) + 1 + 2 * 4


def test_a_finished_sweep_only_repeats_failures_on_request(tmp_path):
    swept(tmp_path, Here({("check", "ring"): PointError("it took more than 60 s")}))
    again = Here()
    assert swept(tmp_path, again)["ring", 32]["failed"] is not None and again.requests == []
    results = SweepResults.open(tmp_path, options(), again=True)
    sweep.run(options(), results, again, lambda _: None)
    assert {name for _, name in again.requests} == {None, "ring"}
    assert results.rows[-1]["failed"] is None and len(results.rows[-1]["seconds"]) == 2


def test_a_point_may_take_so_long_in_all(tmp_path, monkeypatch):
    now = iter(range(0, 10**6, 10))
    monkeypatch.setattr(sweep.time, "monotonic", lambda: next(now))
    here = Here()
    rows = swept(tmp_path, here, limit=35.0, rounds=9)
    assert rows["ring", 32]["failed"] == "it took more than 35 s"
    assert len(rows["ring", 32]["seconds"]) == 2  # after the check and the costs


def test_a_rank_shares_one_workloads_tensors():
    here = Here()
    request = {"workload": options().workloads()[0].as_dict(), "contender": "ring"}
    here.ask(1, request | {"do": "time"}, 1)
    here.ask(1, request | {"do": "time", "contender": "all_gather"}, 1)
    steps = here._rank._steps
    assert steps["ring"].tensors is steps["all_gather"].tensors
    here.ask(1, request | {"do": "time", "workload": request["workload"] | {"tokens": 36}}, 1)
    assert set(here._rank._steps) == {"ring"} and len(here._rank._steps["ring"].tensors[0]) == 36


def test_memory_is_what_a_step_holds():
    def step():
        return torch.ones(64 * 2**20, dtype=torch.uint8)

    found = rank.peak_memory(step, torch.device("cpu"))
    # Linux counts a thread's pages in lots of 64.
    assert found is None or 63 * 2**20 <= found < 80 * 2**20


def test_a_points_time_limit_covers_all_its_steps(tmp_path):
    rows = swept(tmp_path, Here({("time", "ring"): PointError("more than 4.7 s", late=True)}))
    assert rows["ring", 32]["failed"] == "it took more than 60 s"


def test_links_are_measured_again_on_other_hosts(tmp_path, monkeypatch):
    swept(tmp_path, Here({("check", "ring"): PointError("it took more than 60 s")}))
    results, here = SweepResults.open(tmp_path, options(), again=True), Here()
    results.content["links"]["places"][0]["host"] = "another"
    sweep.run(options(), results, here, lambda _: None)
    assert results.content["links"]["places"][0]["host"] != "another"


def test_messages_that_fail_are_an_error(tmp_path):
    with pytest.raises(StartError, match="messages between ranks fail: no route"):
        swept(tmp_path, Here({("device", None): PointError("no route")}))
