"""Cluster: which devices there are, and which links join them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from seqpar.arguments import as_int
from seqpar.costs.device import Device, Link, build
from seqpar.costs.devices import NODES
from seqpar.costs.fit import describe

FORMAT, VERSION = "seqpar.cluster", 1
LINKS = ("inside", "between", "host")


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices. Rank r is device r mod `devices_per_node` of its node.

    Make one with `preset`, `from_json` or `here`; `dataclasses.replace` changes a figure of it.

    Attributes:
        name: what it is called.
        nodes: how many nodes there are.
        devices_per_node: how many devices each has, one for each rank.
        nics: how many NICs each node has, which its devices share; 0 only if there is one node.
        device: what each device computes in a second.
        inside: the link between two devices of a node, one for each device.
        between: the link between two nodes, one for each NIC.
        host: the link from a device to its host's memory, one for each device.
        overlaps: whether messages travel while devices compute. Cores that move them themselves
            hide nothing, and take as long for what they receive as for what they send.
        measured: what the figures were measured from, if they were: hardware, versions and raw
            samples. It is carried along in JSON, and equal clusters may differ in it.
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
    measured: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("devices_per_node", 1), ("nics", 0)):
            object.__setattr__(self, name, as_int(name, getattr(self, name), least))
        for name, kind in (("device", Device), ("overlaps", bool), *((x, Link) for x in LINKS)):
            if not isinstance(getattr(self, name), kind):
                found = getattr(self, name)
                raise TypeError(f"{name} must be a {kind.__name__}, got {found!r}")
        if self.nodes > 1 and self.nics == 0:
            raise ValueError(f"nics must be at least 1 where there are {self.nodes} nodes")

    @property
    def ranks(self) -> int:
        """How many devices there are."""
        return self.nodes * self.devices_per_node

    @classmethod
    def preset(cls, name: str) -> Cluster:
        """Return a cluster by name: "4x8-h100" is 4 nodes of 8 H100.

        There may be any number of nodes, of 1 to 8 devices each. A node with fewer than 8 has as
        many fewer NICs. Devices: h100, h200, h800, a100, a800.
        """
        match = re.fullmatch(r"(\d+)x(\d+)-(\w+)", str(name).lower())
        if not match or match[3] not in NODES:
            known = ", ".join(NODES)
            raise ValueError(f'preset must be like "4x8-h100", of {known}; got {name!r}')
        nodes, devices, kind = int(match[1]), int(match[2]), NODES[match[3]]
        if not 1 <= devices <= 8:
            raise ValueError(f"preset {name!r}: a node has 1 to 8 devices, got {devices}")
        nics = -(-kind.nics * devices // 8)
        inside, between, host = kind.links
        return cls(match[0], nodes, devices, nics, kind.device, inside, between, host)

    @classmethod
    def here(cls, path: str | Path | None = None, refresh: bool = False) -> Cluster:
        """Return this machine as one node, its devices being its GPUs, or its cores if it has none.

        It is read from the profile at `path`, by default a file that is named for the devices, in
        $SEQPAR_CACHE or ~/.cache/seqpar. If there is none, or with `refresh`, this machine is
        measured, which takes about 15 seconds on a CPU and should have no other work to do
        meanwhile, and the profile is saved. Ranks that plan together should read the same file.
        """
        from seqpar.bench import profile  # descriptions need no kernels otherwise

        if path is None:
            folder = os.environ.get("SEQPAR_CACHE", "~/.cache/seqpar")
            path = Path(folder, f"cluster-{profile.machine()}.json")
        path = Path(path).expanduser()
        if refresh or not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            cls(**describe(profile.profile())).to_json(path)
        return cls.from_json(path)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the cluster as JSON: all figures, and what they were measured from.

        With `path` it is also written into that file.
        """
        values = {name: getattr(self, name) for name in ("name", "nodes", "devices_per_node")}
        values |= {"ranks": self.ranks, "nics": self.nics, "device": self.device.as_dict()}
        values |= {name: asdict(getattr(self, name)) for name in LINKS}
        values |= {"overlaps": self.overlaps, "measured": self.measured}
        text = json.dumps({"format": FORMAT, "version": VERSION} | values, indent=1) + "\n"
        if path is not None:
            written = Path(f"{path}.{os.getpid()}")
            written.write_text(text)
            written.replace(path)  # at once: other ranks may read the file meanwhile
        return text

    @classmethod
    def from_json(cls, path: str | Path) -> Cluster:
        """Return the cluster that a file describes, as `to_json` writes it.

        Raise a ValueError that names the field which is missing, wrong or contradicts another one,
        or the version if it is another.
        """
        try:
            return cls.from_text(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def from_text(cls, text: str) -> Cluster:
        """Return the cluster that `to_json` returned as text; errors are as in `from_json`."""
        try:
            return _from_fields(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"this is not JSON: {error}") from None


def _from_fields(values: Any) -> Cluster:
    """Return the cluster of a JSON file's object; raise a ValueError that names a wrong field."""
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"format must be {FORMAT!r}: this is no description of a cluster")
    if values.get("version") != VERSION:
        raise ValueError(f"version must be {VERSION}, got {values.get('version')!r}")
    fields = {name: x for name, x in values.items() if name not in ("format", "version", "ranks")}
    for name in ("nodes", "devices_per_node", "device", "nics"):
        if isinstance(fields.get(name), list):
            raise ValueError(f"{name} must be the same for all nodes, got a list")
    for name in LINKS:
        fields[name] = build(Link, name, fields.get(name))
    fields["device"] = Device.from_dict(fields.get("device"))
    cluster: Cluster = build(Cluster, "cluster", fields)
    if values.get("ranks", cluster.ranks) != cluster.ranks:
        product = f"nodes · devices_per_node = {cluster.ranks}"
        raise ValueError(f"ranks must be {product}, got {values['ranks']!r}")
    return cluster
