"""Cluster: the devices of ranks, and the links between these devices."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from seqpar.core.arguments import as_int, check_type, shown
from seqpar.costs.device import Device, Fabric, Link, Torus, build, fabric_as_dict, fabric_from_dict
from seqpar.costs.devices import NODES, core, node_like
from seqpar.costs.fit import SHARED_MEMORY, describe
from seqpar.costs.profile.harness import Profile, environment

FORMAT, VERSION = "seqpar.cluster", 1
LINKS = ("inside", "between", "host")
_MAX_LOCK_SECONDS = 300.0  # a process that has waited this long for another one measures itself
_log = logging.getLogger("seqpar")


@dataclass(frozen=True)
class Cluster:
    """Nodes with equal devices. Rank r runs on device r mod `devices_per_node` of its node.

    Create a cluster with `preset`, `from_json` or `here`. Change fields with `dataclasses.replace`.

    Attributes:
        name: a name for messages and tables.
        nodes: the number of nodes.
        devices_per_node: the number of devices per node, one for each rank.
        nics: the number of NICs per node, which the devices of the node share. The number can be 0
            if there is only one node.
        device: the speed and memory of each device.
        inside: the link of each device to the other devices of its node.
        between: the link of each NIC to other nodes.
        host: the link of each device to the memory of its host.
        overlaps: whether devices can send messages while they compute. If False, a core is busy
            while it sends or receives, so computation never hides communication.
        fabric: a `FatTree` or a `Torus`, whose links are shared by the messages of several nodes.
            None if messages of different nodes share no links.
        measured: the profile from which the figures were computed, with hardware, versions and raw
            samples, or None. JSON files contain the profile. Comparisons of clusters ignore it.
    """

    name: str
    nodes: int
    devices_per_node: int
    nics: int
    device: Device
    inside: Link
    between: Link
    host: Link
    overlaps: bool = True
    fabric: Fabric | None = None
    measured: Profile | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("devices_per_node", 1), ("nics", 0)):
            object.__setattr__(self, name, as_int(name, getattr(self, name), least))
        kinds = {"name": str, "device": Device, "overlaps": bool, **dict.fromkeys(LINKS, Link)}
        for name, kind in kinds.items():
            check_type(name, getattr(self, name), kind)
        if self.nodes > 1 and self.nics == 0:
            raise ValueError(f"nics must be at least 1 for {self.nodes} nodes, got 0")
        if not isinstance(self.fabric, Fabric | None):
            raise TypeError(f"fabric must be a FatTree, a Torus or None, got {self.fabric!r}")
        if isinstance(self.fabric, Torus) and self.fabric.nodes != self.nodes:
            shape = self.fabric.shape
            raise ValueError(
                f"fabric.shape must have {self.nodes} nodes, as nodes says, got {shape}"
            )
        if self.measured is not None:
            check_type("measured", self.measured, dict)

    @property
    def ranks(self) -> int:
        return self.nodes * self.devices_per_node

    @classmethod
    def preset(cls, name: str) -> Cluster:
        """Return the cluster with a name such as "4x8-h100", which has 4 nodes of 8 H100.

        A cluster can have any number of nodes, with 1 to 8 devices per node. A node with fewer than
        8 devices has proportionally fewer NICs. These devices are known: h100, h200, h100_fa4 and
        h200_fa4 (both with FlashAttention-4), h800, a100 and a800.
        """
        match = re.fullmatch(r"(\d+)x(\d+)-(\w+)", name.lower() if isinstance(name, str) else "")
        if not match or match[3] not in NODES:
            known = ", ".join(NODES)
            raise ValueError(
                f'preset must be like "4x8-h100", of the devices {known}; got {shown(name)}'
            )
        nodes, devices, kind = int(match[1]), int(match[2]), NODES[match[3]]
        if not 1 <= devices <= 8:
            raise ValueError(f"preset {name!r}: a node has 1 to 8 devices, got {devices}")
        nics = -(-kind.nics * devices // 8)
        inside, between, host = kind.links
        return cls(match[0], nodes, devices, nics, kind.device, inside, between, host)

    @classmethod
    def here(cls, path: str | Path | None = None, refresh: bool = False) -> Cluster:
        """Return this machine as one node. Its devices are the GPUs or, without GPUs, the cores.

        The description is read from the profile at `path`. By default, this is a file in
        $SEQPAR_CACHE or ~/.cache/seqpar whose name contains the names of the devices. If the file
        does not exist, or with `refresh`, this machine is measured, and the profile is saved. On a
        CPU this takes about 15 seconds, during which the machine should be otherwise idle. Ranks
        that plan together should read the same file.

        If several processes use the same folder, one process measures, and all other processes wait
        and then read the result. If the default file is damaged or describes a different device, a
        warning is logged, and a new measurement replaces the file. If the default folder is not
        writable, a warning is logged, and the profile is not saved. If `path` is given, a damaged
        file raises a ValueError, and a file that cannot be written raises an OSError.
        """
        # Imported here, because it imports kernels, which presets do not need.
        from seqpar.costs.profile import machine

        is_default = path is None
        if path is None:
            folder = os.environ.get("SEQPAR_CACHE", "~/.cache/seqpar")
            path = Path(folder, f"cluster-{machine.machine()}.json")
        file = Path(path)
        try:
            file = file.expanduser()
            file.parent.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError) as error:  # RuntimeError if the user has no home folder
            if not is_default:
                raise
            return cls(**describe(machine.profile()))._unsaved(file, error)
        if not refresh and (kept := cls._kept(file, is_default)):
            return kept
        with _measuring_alone(file.parent):
            if not refresh and (kept := cls._kept(file, is_default, quiet=True)):
                return kept
            made = cls(**describe(machine.profile()))
            try:
                made.to_json(file)
            except OSError as error:
                if not is_default:
                    raise
                return made._unsaved(file, error)
        return made

    @classmethod
    def _kept(cls, path: Path, is_default: bool, quiet: bool = False) -> Cluster | None:
        if not path.exists():
            return None
        try:
            kept = cls.from_json(path)
        except (ValueError, OSError) as error:
            if not is_default:
                raise
            reason = str(error)
        else:
            recorded = None if kept.measured is None else kept.measured.get("environment")
            is_own = not is_default or not isinstance(recorded, dict)
            if is_own or kept.device.name == environment()["device"]:
                return kept
            reason = f"{path} is of a different device: {kept.device.name}"
        if not quiet:
            _log.warning("%s; this machine is measured again", reason)
        return None

    def _unsaved(self, path: Path, error: Exception) -> Cluster:
        problem = "the profile of this machine is not kept, so every program measures it again"
        _log.warning("%s (%s: %s); set SEQPAR_CACHE to a writable folder", problem, path, error)
        return self

    @classmethod
    def assumed(cls) -> Cluster:
        """Return this machine as one node, with figures of similar devices instead of measurements.

        If the name of the GPU contains the name of a preset's device, the GPU has the figures of
        this preset. Otherwise the GPU has the figures of an H100. A core has the figures of
        `devices.core`.
        """
        import torch

        from seqpar.costs.profile import machine

        device, count = environment()["device"], machine.devices()
        if torch.cuda.is_available():
            node = node_like(device)
            kind = replace(node.device, name=str(device), memory=machine.memory())
            return cls("assumed", 1, count, node.nics, kind, *node.links)
        kind = replace(core(), name=str(device), memory=machine.memory())
        host = Link(0.0, kind.memory_bandwidth / 2)
        return cls("assumed", 1, count, 0, kind, SHARED_MEMORY, SHARED_MEMORY, host, False)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the cluster as JSON text, including its profile.

        If `path` is given, the text is also written to this file.
        """
        values = {name: getattr(self, name) for name in ("name", "nodes", "devices_per_node")}
        values |= {"ranks": self.ranks, "nics": self.nics, "device": self.device.as_dict()}
        values |= {name: asdict(getattr(self, name)) for name in LINKS}
        values |= {"overlaps": self.overlaps, "fabric": fabric_as_dict(self.fabric)}
        values |= {"measured": self.measured}
        text = json.dumps({"format": FORMAT, "version": VERSION} | values, indent=1) + "\n"
        if path is not None:
            written = Path(f"{path}.{os.getpid()}")
            try:
                written.write_text(text)
                written.replace(path)  # atomic, because other ranks can be reading the file
            except OSError:
                written.unlink(missing_ok=True)
                raise
        return text

    @classmethod
    def from_json(cls, path: str | Path) -> Cluster:
        """Return the cluster of a file that `to_json` has written.

        Raises a ValueError if the version is unknown, or if a field is missing, wrong or
        inconsistent with a different field. The error names the field.
        """
        try:
            return cls.from_text(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def from_text(cls, text: str) -> Cluster:
        """Return the cluster of a text that `to_json` has made, with the errors of `from_json`."""
        try:
            return _from_fields(json.loads(text))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"text must be JSON, as to_json writes it: {error}") from None


def as_cluster(value: Cluster | str) -> Cluster:
    """Return the cluster, or the preset of this name. Errors name the argument `cluster`."""
    if isinstance(value, str):
        try:
            return Cluster.preset(value)
        except ValueError as fault:
            raise ValueError(f"cluster: {fault}") from None
    if not isinstance(value, Cluster):
        expected = "a Cluster or the name of a preset, such as '4x8-h100'"
        raise TypeError(f"cluster must be {expected}, got {shown(value)}")
    return value


@contextmanager
def _measuring_alone(folder: Path) -> Iterator[None]:
    """Lock the folder, so that only this process measures, if the file system supports locks."""
    from seqpar.costs.profile.machine import seconds_left

    end = time.monotonic() + min(_MAX_LOCK_SECONDS, seconds_left())
    descriptor = None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    break
                time.sleep(0.1)
    # The file system has no locks; several processes can measure, and the last file remains.
    except OSError:
        pass
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _from_fields(values: object) -> Cluster:
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"format must be {FORMAT!r}, as Cluster.to_json writes it")
    if values.get("version") != VERSION:
        raise ValueError(f"version must be {VERSION}, got {values.get('version')!r}")
    fields = {name: x for name, x in values.items() if name not in ("format", "version", "ranks")}
    for name in ("nodes", "devices_per_node", "device", "nics"):
        if isinstance(fields.get(name), list):
            raise ValueError(f"{name} must be one value, the same for all nodes, got a list")
    for name in LINKS:
        fields[name] = build(Link, name, fields.get(name))
    fields["device"] = Device.from_dict(fields.get("device"))
    fields["fabric"] = fabric_from_dict(fields.get("fabric"))
    cluster = build(Cluster, "cluster", fields)
    if values.get("ranks", cluster.ranks) != cluster.ranks:
        product = f"nodes · devices_per_node = {cluster.ranks}"
        raise ValueError(f"ranks must be {product}, got {values['ranks']!r}")
    return cluster
