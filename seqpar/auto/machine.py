"""Describe the machine that a group's ranks are on, the same to all of them."""

from __future__ import annotations

import json
import logging
import socket
from dataclasses import replace

from seqpar.auto.launch_overhead import with_host
from seqpar.comm.messages.exchange import Comm
from seqpar.comm.waiting import bounded, while_others_wait
from seqpar.costs.cluster import Cluster
from seqpar.costs.profile import machine

MEASURE_SECONDS = 60.0  # for rank 0 to measure its machine, by default
_DOING = "rank 0 measures this machine"
_MEASURING_SHARE = 0.8  # of that time; afterwards no new round begins
_MIN_SECONDS = 2.0  # enough to read a profile from the cache
_log = logging.getLogger("seqpar")


def cluster_of_rank_0(comm: Comm, seconds: float = MEASURE_SECONDS) -> Cluster:
    """Return rank 0's `Cluster.here()`; raise on all ranks what it raises there.

    If that takes longer than `seconds`, return `Cluster.assumed()`, and log that. The other ranks
    wait at the group's store meanwhile, so that the group's timeout does not count.
    """
    hosts = sorted({*comm.all_gather_text(socket.gethostname(), label="hosts")})
    if len(hosts) > 1:
        raise ValueError(f"cluster must be given where ranks are on several hosts: {hosts}")

    def describe() -> dict[str, str]:
        try:
            cluster = replace(_here(seconds), measured=None)
        except Exception as fault:  # whatever it is: the other ranks wait for this one
            return {"cluster": "", "fault": f"{type(fault).__name__}: {fault}"}
        return {"cluster": cluster.to_json(), "fault": ""}

    own = while_others_wait(comm, describe, _DOING, max(seconds, _MIN_SECONDS))
    texts = comm.all_gather_text(json.dumps(own), label="cluster")
    answer = json.loads(texts[0])
    if answer["fault"]:
        raise ValueError(f"cluster: rank 0 cannot describe its machine: {answer['fault']}")
    return Cluster.from_text(answer["cluster"])


def _here(seconds: float) -> Cluster:
    """Return this machine as measured, or as assumed if there is not the time to measure it."""
    limit = max(seconds, _MIN_SECONDS)

    def measured() -> Cluster:
        with machine.within(_MEASURING_SHARE * seconds):
            return Cluster.here()

    try:
        return with_host(bounded(measured, _DOING, limit))
    except TimeoutError:
        how = "call seqpar.balance.Cluster.here() in a program before this one"
        _log.warning("%s: not done after %.0f s, so figures are assumed; %s", _DOING, limit, how)
        return Cluster.assumed()
