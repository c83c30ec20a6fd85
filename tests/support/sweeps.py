"""Tiny sweeps: their options, and a rank in this process that answers their requests."""

import json
import time

import torch

from seqpar.bench.workers.rank import Rank, answer_to
from seqpar.bench.workers.ranks import PointError
from seqpar.bench.workloads.workloads import SweepOptions
from seqpar.comm.messages.comm import Comm

GIVEN = {
    "strategies": ["ring"], "peers": ["none"], "lengths": ["32"], "scaling": None,
    "heads": ["2:1x8"], "masks": None, "ranks": ["1"], "dtype": None, "passes": None,
    "preset": None, "device": "cpu", "rounds": 2, "limit": 60.0,
}  # fmt: skip


def options(where=None, **changes):
    """Return the options of a tiny sweep, with some options changed."""
    return SweepOptions.of(GIVEN | changes, where)


class Here:
    """One rank in this process.

    `faults` maps (what is asked, contender) to an error that is raised in place of an answer.
    `requests` lists what was asked.
    """

    def __init__(self, faults=()):
        self.requests, self._faults = [], dict(faults)
        self._rank = Rank(Comm("here", 0, 1), torch.device("cpu"))

    def ready(self, ranks):
        pass

    def ask(self, ranks, request, limit):
        asked = request["do"], request.get("contender")
        self.requests.append(asked)
        if asked in self._faults:
            raise self._faults[asked]
        answer = answer_to(self._rank, json.loads(json.dumps(request)))
        if "failed" in answer:
            raise PointError(answer["failed"])
        return [json.loads(json.dumps(answer["value"]))] * ranks


def row(contender, seconds, exposed=None, ranks=2, tokens=64, memory=2**20, failed=None, **changes):
    """Make a row of results, as if it had been measured."""
    workload = {
        "ranks": ranks, "tokens": tokens, "heads": 4, "kv_heads": 2, "head_dim": 8,
        "mask": "causal", "dtype": "fp32", "passes": "forward", **changes,
    }  # fmt: skip
    exposure = None
    if exposed is not None:
        exposure = {"total": 1.0, "without_communication": 1.0 - exposed, "fraction": 0.5}
    return {
        "workload": workload, "contender": contender, "failed": failed, "spent": 0.0,
        "check": {"relative": 1e-6, "of_one_device": 1.1}, "seconds": seconds,
        "costs": {"memory": [memory, memory // 2], "bytes": [10, 20], "exposure": exposure},
    }  # fmt: skip


def hang(*_):
    time.sleep(3600)
