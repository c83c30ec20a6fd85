"""Devices, links and fabrics: the speed of a device, of a link, and of shared links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from seqpar.core.arguments import as_bool, as_float, as_int, check_type, shown
from seqpar.costs.grid import Floats, Grid

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def check_positive(values: Mapping[str, object], zero: tuple[str, ...] = ()) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise ValueError(f"{name} must be a number, got {value!r}")
        if not (0 <= value < np.inf) or (value == 0 and name not in zero):
            least = "at least 0" if name in zero else "positive"
            raise ValueError(f"{name} must be {least} and finite, got {value!r}")


@dataclass(frozen=True)
class Link:
    """A class of equal links.

    Attributes:
        latency: the seconds that every message takes in addition to its bytes.
        rate: bytes per second in each direction.
        shared: the total rate of several messages with the same sender or receiver, divided by
            `rate`.
    """

    latency: float
    rate: float
    shared: float = 1.0

    def __post_init__(self) -> None:
        check_positive(asdict(self), zero=("latency",))
        if self.shared > 1:
            raise ValueError(f"shared must be at most 1, got {self.shared}")

    def seconds(self, nbytes: ArrayLike) -> Floats:
        """Return the seconds of messages. A message of 0 bytes is not sent and takes no time."""
        nbytes = np.asarray(nbytes, np.float64)
        return np.where(nbytes > 0, self.latency + nbytes / self.rate, 0.0)


@dataclass(frozen=True)
class FatTree:
    """Leaf switches, which are connected by further switches.

    Attributes:
        nodes_per_leaf: the number of consecutive nodes on a leaf switch.
        oversubscription: the rate of all NICs on a leaf switch divided by the rate of its uplinks,
            at least 1.
        rails: whether NICs with different indices are on different leaf switches. If so, the device
            with index i in its node sends through NIC i, and messages between devices with
            different indices use the uplinks.
    """

    nodes_per_leaf: int
    oversubscription: float = 1.0
    rails: bool = False

    def __post_init__(self) -> None:
        as_int("fabric.nodes_per_leaf", self.nodes_per_leaf, 1)
        as_bool("fabric.rails", self.rails)
        got = as_float("fabric.oversubscription", self.oversubscription)
        if not 1 <= got < np.inf:
            raise ValueError(f"fabric.oversubscription must be finite and at least 1, got {got}")


@dataclass(frozen=True)
class Torus:
    """Nodes in a grid. The nodes of each row, column, … are connected in a ring, as in TPUs.

    Each link carries one message at full rate in each direction. A message uses the shortest route,
    along one dimension after another. The latencies of all links on the route are added.

    Attributes:
        shape: the number of nodes in each dimension. Nodes are numbered along the last dimension
            first.
    """

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        shape = tuple(as_int("fabric.shape", x, 1) for x in self.shape)
        object.__setattr__(self, "shape", shape)

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return prod(self.shape)

    def links(self, source: int, target: int) -> Iterator[tuple[int, int, int]]:
        """Yield the links of the route between two nodes, as (node, dimension, direction)."""
        place, end = (np.unravel_index(node, self.shape) for node in (source, target))
        here = [int(x) for x in place]
        for dimension, size in enumerate(self.shape):
            ahead = (int(end[dimension]) - here[dimension]) % size
            direction, steps = (1, ahead) if 2 * ahead <= size else (-1, size - ahead)
            for _ in range(steps):
                yield int(np.ravel_multi_index(here, self.shape)), dimension, direction
                here[dimension] = (here[dimension] + direction) % size


Fabric = FatTree | Torus
_FABRICS = {"fat_tree": FatTree, "torus": Torus}


def fabric_as_dict(fabric: Fabric | None) -> dict[str, object] | None:
    if fabric is None:
        return None
    (kind,) = (name for name, x in _FABRICS.items() if isinstance(fabric, x))
    return {"kind": kind} | asdict(fabric)


def fabric_from_dict(values: Any) -> Fabric | None:
    """Create a fabric from JSON values. Raises a ValueError that names a wrong field."""
    if values is None:
        return None
    kinds = [*_FABRICS]  # a list, because the kind in a damaged file can be unhashable
    if not isinstance(values, Mapping) or values.get("kind") not in kinds:
        raise ValueError(f"fabric.kind must be one of {kinds}, got {shown(values)}")
    others = {name: x for name, x in values.items() if name != "kind"}
    try:
        made: Fabric = _FABRICS[values["kind"]](**others)
    except TypeError as error:
        raise ValueError(f"fabric: {error}") from None
    return made


@dataclass(frozen=True)
class Recurrent:
    """The seconds of causal linear attention, forward and backward."""

    # Each pair is (forward, backward).
    call: tuple[float, float]  # constant seconds per call
    row: tuple[float, float]  # seconds per token, for any number of heads
    token: tuple[float, float]  # seconds per token and KV head, for dims of `head_dim`
    head_dim: int  # the measured head dim; costs are proportional to it

    def __post_init__(self) -> None:
        for name in ("call", "row", "token"):
            pair = tuple(getattr(self, name))
            if len(pair) != 2:
                raise ValueError(f"{name} must be (forward, backward), got {pair!r}")
            object.__setattr__(self, name, pair)
            for way, value in zip(("forward", "backward"), pair, strict=True):
                check_positive({f"{name} {way}": value}, (f"call {way}", f"row {way}"))
        check_positive({"head_dim": self.head_dim})

    def work(
        self, tokens: ArrayLike, heads: int, key_dim: int, value_dim: int, backward: bool = False
    ) -> Floats:
        """Return the seconds of linear attention in one layer, without the constant seconds of a
        call.
        """
        width = heads * (key_dim + value_dim) / (2 * self.head_dim)
        each = self.row[backward] + self.token[backward] * width
        return np.asarray(tokens, np.float64) * each


@dataclass(frozen=True)
class Device:
    """One device: a GPU, or the core of one rank.

    Attributes:
        name: its name.
        memory: the bytes of memory.
        matmul_rate: peak FLOP/s of dense matrix products in `dtype`.
        matmul_share: the fraction of `matmul_rate` that linear modules reach, from 0 to 1.
        memory_bandwidth: the bandwidth of memory in bytes per second.
        dtype: the dtype of weights and activations.
        attention: the measured seconds of softmax attention.
        recurrent: the measured seconds of linear attention.
        new_memory: the seconds per byte for allocating memory, in addition to the time for using
            it; 0 if torch reuses freed memory, as on GPUs.
        operator: the host's seconds for each torch operator; 0 if the host runs ahead of the
            device.
    """

    name: str
    memory: float
    matmul_rate: float
    matmul_share: float
    memory_bandwidth: float
    dtype: str
    attention: Grid = field(repr=False)
    recurrent: Recurrent = field(repr=False)
    new_memory: float = 0.0
    operator: float = 0.0

    def __post_init__(self) -> None:
        check_type("name", self.name, str)
        names = ("memory", "matmul_rate", "matmul_share", "memory_bandwidth")
        check_positive({name: getattr(self, name) for name in names})
        least = ("new_memory", "operator")
        check_positive({name: getattr(self, name) for name in least}, zero=least)
        if self.matmul_share > 1:
            raise ValueError(f"matmul_share must be at most 1, got {self.matmul_share}")
        if self.dtype not in ITEMSIZES:
            raise ValueError(f"dtype must be one of {[*ITEMSIZES]}, got {self.dtype!r}")

    @property
    def itemsize(self) -> int:
        """The bytes of an element of `dtype`."""
        return ITEMSIZES[self.dtype]

    @property
    def reached_rate(self) -> float:
        """The FLOP/s that linear modules reach."""
        return self.matmul_rate * self.matmul_share

    def as_dict(self) -> dict[str, object]:
        """Return the fields as plain numbers, for JSON."""
        return asdict(self) | {"attention": self.attention.as_dict()}

    @classmethod
    def from_dict(cls, values: object) -> Device:
        """Create a device from the result of `as_dict`. Raises a ValueError that names a wrong
        field.
        """
        if not isinstance(values, dict):
            raise ValueError(f"device must be an object with fields, got {values!r}")
        parts = {
            "attention": build(Grid, "device.attention", values.get("attention")),
            "recurrent": build(Recurrent, "device.recurrent", values.get("recurrent")),
        }
        return build(cls, "device", values | parts)


def build(cls: type[T], where: str, values: object) -> T:
    if not isinstance(values, dict):
        raise ValueError(f"{where} must be an object with fields, got {values!r}")
    known = {field.name for field in fields(cls)}
    required = {field.name for field in fields(cls) if field.default is MISSING}
    if missing := sorted(required - {*values}):
        raise ValueError(f"{where} must have the field {missing[0]!r}, got {sorted(values)}")
    if unknown := sorted({*values} - known):
        raise ValueError(f"{where} must have the fields {sorted(known)} only, got {unknown[0]!r}")
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
