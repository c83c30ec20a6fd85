"""Hosts of several ranks, each with its own NIC, joined by a switch.

    with Hosts(hosts=2, nics=2, rate_mbit=400) as network:  # ranks 0 and 1, and 2 and 3
        answers = network(function, argument)

A rank has a network namespace with its NIC: a veth device that leads to the switch, with a token
bucket in each direction. Veth devices join the ranks of a host, optionally with a limit.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from benchmarks.network.emulated import (
    HostCall,
    Network,
    _be_host,
    _be_switch,
    _command,
    _isolate,
    _limit,
    address,
)

NIC = "nic"  # name of the device


class Hosts(Network):
    """Ranks count along a host's NICs, and are joined by links of `inside_mbit` (0: no limit)."""

    def __init__(
        self, hosts: int, nics: int, rate_mbit: int, inside_mbit: int = 0, timeout: float = 120
    ) -> None:
        super().__init__("switch", hosts * nics, rate_mbit, timeout)
        self.nics, self.inside_mbit = nics, inside_mbit

    def _wire(self) -> None:
        self._ask([(_isolate, ())] * len(self._pipes))
        ranks, ports = range(self.ranks), [f"to{rank}" for rank in range(self.ranks)]
        near = [
            [peer for peer in ranks if peer // self.nics == rank // self.nics] for rank in ranks
        ]
        links = [(rank, NIC, self.ranks, ports[rank]) for rank in ranks]
        for a, b in itertools.combinations(ranks, 2):
            if b in near[a]:
                links.append((a, ports[b], b, ports[a]))
        for a, name, b, peer_name in links:
            ends = [("netns", str(self._processes[place].pid)) for place in (a, b)]
            pair = (name, *ends[0], "type", "veth", "peer", "name", peer_name, *ends[1])
            _command("ip", "link", "add", *pair)
        calls: list[HostCall] = []
        for rank in ranks:
            far = [peer for peer in ranks if peer not in near[rank]]
            rates = self.rate_mbit, self.inside_mbit
            calls.append((_be_rank, (rank, far, near[rank], *rates)))
        self._ask([*calls, (_be_switch, (ports, self.rate_mbit))])


def _be_rank(rank: int, far: list[int], near: list[int], rate_mbit: int, inside_mbit: int) -> None:
    """Reach other hosts by the NIC, and the other ranks of this one by a link to each."""
    _be_host(rank, {NIC: far}, rate_mbit)
    for peer in near:
        if peer != rank:
            device, way = f"to{peer}", f"{address(peer)}/32"
            _limit(device, inside_mbit)
            _command("ip", "route", "add", way, "dev", device, "src", address(rank))


def sent_bytes() -> int:
    """Return the bytes that this rank's NIC has sent so far, including TCP headers."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == NIC:
            return int(counts.split()[8])
    raise RuntimeError("this rank has no NIC")
