"""Describe the machine of a group's ranks, identically on all ranks."""

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

MEASURE_SECONDS = 60.0  # the default limit for rank 0 to measure its machine
_ACTIVITY = "rank 0 measures this machine"
_MEASURING_SHARE = 0.8  # of the limit; afterwards no new round begins
_MIN_SECONDS = 2.0  # enough to read a profile from the cache
_log = logging.getLogger("seqpar")


def cluster_of_rank_0(comm: Comm, seconds: float = MEASURE_SECONDS) -> Cluster:
    """Return rank 0's `Cluster.here()` on all ranks; an error there is raised on all ranks.

    After `seconds` it is `Cluster.assumed()`, with a warning. Others wait at the group's store.
    """
    hosts = sorted({*comm.all_gather_text(socket.gethostname(), label="hosts")})
    if len(hosts) > 1:
        raise ValueError(f"cluster must be given where ranks are on several hosts: {hosts}")

    def describe() -> dict[str, str]:
        try:
            cluster = replace(_here(seconds), measured=None)
        except Exception as fault:  # any error must reach the ranks that wait
            return {"cluster": "", "fault": f"{type(fault).__name__}: {fault}"}
        return {"cluster": cluster.to_json(), "fault": ""}

    own = while_others_wait(comm, describe, _ACTIVITY, max(seconds, _MIN_SECONDS))
    texts = comm.all_gather_text(json.dumps(own), label="cluster")
    description = json.loads(texts[0])
    if description["fault"]:
        raise ValueError(f"cluster: rank 0 cannot describe its machine: {description['fault']}")
    return Cluster.from_text(description["cluster"])


def _here(seconds: float) -> Cluster:
    limit = max(seconds, _MIN_SECONDS)

    def measured() -> Cluster:
        with machine.within(_MEASURING_SHARE * seconds):
            return Cluster.here()

    try:
        return with_host(bounded(measured, _ACTIVITY, limit))
    except TimeoutError:
        remedy = "call seqpar.balance.Cluster.here() in a program before this one"
        message = "%s: not done after %.0f s, so figures are assumed; %s"
        _log.warning(message, _ACTIVITY, limit, remedy)
        return Cluster.assumed()
