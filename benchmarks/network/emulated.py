"""Ranks on links of a known rate, on one Linux machine.

    with Network("mesh", ranks=4, rate_mbit=400) as network:
        answers = network(function, argument)  # on every rank, in a gloo group of all ranks

Each rank is a process in a network namespace. Veth pairs with token buckets join them.

* `mesh`: a separate link between every two ranks, full duplex.
* `switch`: one link from each rank to a switch, which limits a rank's whole egress and ingress.
* `loopback`: no namespaces and no limit.

Needs root and the commands ip and tc, except for `loopback`. A namespace lives as long as the
process in it, and every process ends with its parent, however the parent ends. Nothing needs to be
cleaned up.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

BURST = (
    256 * 1024
)  # bytes that an idle link accepts immediately; smaller buckets are not refilled in time
TOPOLOGIES = ("mesh", "switch", "loopback")
_CLONE_NEWNET, _PR_SET_PDEATHSIG = 0x40000000, 1  # <linux/sched.h>, <linux/prctl.h>
HostCall = tuple[Callable[..., Any], tuple[Any, ...]]


def lacking() -> str:
    """Return the missing requirements for limited links, or an empty text."""
    commands = [f"the command {name}" for name in ("ip", "tc") if shutil.which(name) is None]
    return " and ".join(["root"] * (os.geteuid() != 0) + commands)


def address(rank: int) -> str:
    """Return a rank's IP address."""
    return f"10.77.0.{rank + 1}"


class Network:
    """Processes that run functions from pipes. A call that fails or hangs ends them all."""

    def __init__(self, topology: str, ranks: int, rate_mbit: int = 0, timeout: float = 120) -> None:
        if topology not in TOPOLOGIES:
            raise ValueError(f"topology must be one of {', '.join(TOPOLOGIES)}, got {topology!r}")
        if topology != "loopback" and (missing := lacking()):
            raise RuntimeError(f"limited links need {missing}")
        self.topology, self.ranks, self.rate_mbit, self.timeout = (
            topology,
            ranks,
            rate_mbit,
            timeout,
        )
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Network:
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        for _ in range(self.ranks + (self.topology == "switch")):  # the switch comes last
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(os.getpid(), theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        try:
            if self.topology != "loopback":
                self._wire()
            store = (f"{self._folder.name}/store", timedelta(seconds=self.timeout / 2))
            self._ask([(_join, (rank, self.ranks, *store)) for rank in range(self.ranks)])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()
        self._processes, self._pipes = [], []

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the result of function(*arguments) on each rank, in order.

        Raises RuntimeError with the traceback of the first rank that failed.
        """
        return self._ask([(function, arguments)] * self.ranks)

    def _wire(self) -> None:
        self._ask([(_isolate, ())] * len(self._pipes))
        ranks, names = range(self.ranks), [f"to{rank}" for rank in range(self.ranks)]
        if self.topology == "mesh":
            links = [(a, names[b], b, names[a]) for a, b in itertools.combinations(ranks, 2)]
            routes = [{names[peer]: [peer] for peer in ranks if peer != rank} for rank in ranks]
        else:
            links = [(rank, "switch", self.ranks, names[rank]) for rank in ranks]
            routes = [{"switch": [peer for peer in ranks if peer != rank]} for rank in ranks]
        for a, name, b, peer_name in links:
            ends = [("netns", str(self._processes[place].pid)) for place in (a, b)]
            _command(
                "ip",
                "link",
                "add",
                name,
                *ends[0],
                "type",
                "veth",
                "peer",
                "name",
                peer_name,
                *ends[1],
            )
        calls: list[HostCall] = [(_be_host, (rank, routes[rank], self.rate_mbit)) for rank in ranks]
        self._ask(calls + [(_be_switch, (names, self.rate_mbit))] * (self.topology == "switch"))

    def _ask(self, calls: list[HostCall]) -> list[Any]:
        for pipe, call in zip(self._pipes, calls, strict=False):
            pipe.send(call)
        answers = []
        for rank, pipe in enumerate(self._pipes[: len(calls)]):
            failure, answer = (
                pipe.recv() if pipe.poll(self.timeout) else (f"no answer in {self.timeout} s", None)
            )
            if failure:
                self.__exit__()
                raise RuntimeError(f"rank {rank} of {self.ranks}: {failure}")
            answers.append(answer)
        return answers


def _serve(parent: int, pipe: Connection) -> None:
    """Run the functions that arrive through the pipe, in a separate process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # the parent ended before this process could ask to end with it
    torch.set_num_threads(1)
    while True:
        function, arguments = pipe.recv()
        try:
            pipe.send((None, function(*arguments)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))


def _isolate() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "a network namespace was refused")


def _be_host(rank: int, routes: dict[str, list[int]], rate_mbit: int) -> None:
    """Take an address, and limit each device that leads to peers."""
    tcp = Path("/proc/sys/net/ipv4")  # of this namespace
    (tcp / "tcp_congestion_control").write_text(
        "reno"
    )  # always allowed; other algorithms (BBR) sometimes pause to probe the link
    (tcp / "tcp_slow_start_after_idle").write_text("0")
    _command("ip", "link", "set", "lo", "up")
    _command(
        "ip", "address", "delete", "127.0.0.1/8", "dev", "lo"
    )  # otherwise gloo would use it as this rank's address
    _command("ip", "address", "add", f"{address(rank)}/32", "dev", "lo")
    for device, peers in routes.items():
        _limit(device, rate_mbit)
        for peer in peers:
            _command(
                "ip", "route", "add", f"{address(peer)}/32", "dev", device, "src", address(rank)
            )


def _be_switch(devices: list[str], rate_mbit: int) -> None:
    _command("ip", "link", "add", "bridge", "type", "bridge")
    _command("ip", "link", "set", "bridge", "up")
    for device in devices:
        _command("ip", "link", "set", device, "master", "bridge")
        _limit(device, rate_mbit)


def _limit(device: str, rate_mbit: int) -> None:
    if rate_mbit:
        limit = ("rate", f"{rate_mbit}mbit", "burst", f"{BURST}b", "latency", "100ms")
        _command("tc", "qdisc", "add", "dev", device, "root", "tbf", *limit)
    _command("ip", "link", "set", device, "up")


def _join(rank: int, ranks: int, store: str, timeout: timedelta) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the device with each rank's address
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timeout
    )


def _command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
