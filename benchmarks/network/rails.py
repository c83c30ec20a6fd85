"""Hosts with several NICs, and a rank at each: NIC i of every host is on link i.

    with Rails(nics=2, rate_mbit=400) as network:  # two hosts, ranks 0 and 1, and 2 and 3
        answers = network(function, argument)

A host is a network namespace, which its ranks share; veth pairs behind token buckets are the links.
Ranks of one host reach each other through its loopback, which has no limit. What goes to another
host leaves by the NIC that is on the link of the rank that it goes to.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from benchmarks.network.emulated import Network, Task, _command, _isolate, _limit

HOSTS = 2
_CLONE_NEWNET = 0x40000000


class Rails(Network):
    """Two hosts, joined by a link for each NIC; ranks count along the first host's NICs."""

    def __init__(self, nics: int = 2, rate_mbit: int = 0, timeout: float = 120) -> None:
        super().__init__("mesh", HOSTS * nics, rate_mbit, timeout)
        self.topology, self.nics = "rails", nics

    def _wire(self) -> None:
        pids = [process.pid for process in self._processes]
        firsts = [pids[host * self.nics] for host in range(HOSTS)]
        for begins in (True, False):
            tasks: list[Task] = []
            for rank, pid in enumerate(pids):
                first = firsts[rank // self.nics]
                enters = (os.getpid, ()) if pid == first else (_enter, (first,))
                isolates = (_isolate, ()) if pid == first else (os.getpid, ())
                tasks.append(isolates if begins else enters)
            self._ask(tasks)
        for nic in range(self.nics):
            ends = [("netns", str(first)) for first in firsts]
            name = f"nic{nic}"
            pair = [name, *ends[0], "type", "veth", "peer", "name", name, *ends[1]]
            _command("ip", "link", "add", *pair)
        self._ask([(_be_rank, (rank, self.nics, self.rate_mbit)) for rank in range(self.ranks)])


def _enter(pid: int) -> None:
    """Share the network namespace of another process."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{pid}/ns/net").open() as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "the network namespace was refused")


def _be_rank(rank: int, nics: int, rate_mbit: int) -> None:
    """Take a NIC of the host, give it its address, and limit it."""
    host, nic = divmod(rank, nics)
    tcp = Path("/proc/sys/net/ipv4")  # of this namespace
    if nic == 0:
        (tcp / "tcp_congestion_control").write_text("reno")  # as in `emulated.py`
        (tcp / "tcp_slow_start_after_idle").write_text("0")
        _command("ip", "link", "set", "lo", "up")
    # An answer may come by another NIC than it would be sent to.
    for name in ("all", f"nic{nic}"):
        (tcp / f"conf/{name}/rp_filter").write_text("0")
    _limit(f"nic{nic}", rate_mbit)
    _command("ip", "address", "add", f"10.77.{nic}.{host + 1}/24", "dev", f"nic{nic}")
    os.environ["GLOO_SOCKET_IFNAME"] = f"nic{nic}"


def sent_bytes() -> dict[str, int]:
    """Return how many bytes each NIC of this rank's host has sent so far, headers included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    columns = {name.strip(): rest.split() for name, rest in (line.split(":") for line in lines)}
    return {name: int(found[8]) for name, found in columns.items() if name.startswith("nic")}
