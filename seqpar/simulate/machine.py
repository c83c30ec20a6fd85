"""Describe the machine that a group's ranks are on, the same to all of them."""

from __future__ import annotations

import json
import socket
from dataclasses import replace

from seqpar.comm.exchange import Comm
from seqpar.costs.cluster import Cluster
from seqpar.simulate.host import with_host


def cluster_of_rank_0(comm: Comm) -> Cluster:
    """Return rank 0's `Cluster.here()`; raise on all ranks what it raises there."""
    hosts = sorted({*comm.all_gather_text(socket.gethostname(), label="hosts")})
    if len(hosts) > 1:
        raise ValueError(f"cluster must be given where ranks are on several hosts: {hosts}")
    own = {"cluster": "", "fault": ""}
    if comm.rank == 0:
        try:
            own["cluster"] = replace(with_host(Cluster.here()), measured=None).to_json()
        except Exception as fault:  # whatever it is: the other ranks wait for this one
            own["fault"] = f"{type(fault).__name__}: {fault}"
    found = json.loads(comm.all_gather_text(json.dumps(own), label="cluster")[0])
    if found["fault"]:
        raise ValueError(f"cluster: rank 0 cannot describe its machine: {found['fault']}")
    return Cluster.from_text(found["cluster"])
