"""Device and Link: what one device computes and moves in a second."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from seqpar.costs.grid import Floats, Grid

ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def check_positive(values: dict[str, Any], zero: tuple[str, ...] = ()) -> None:
    """Raise a ValueError that names a value which is no positive number; some may be 0."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise ValueError(f"{name} must be a number, got {value!r}")
        if not (0 <= value < np.inf) or (value == 0 and name not in zero):
            least = "at least 0" if name in zero else "positive"
            raise ValueError(f"{name} must be {least} and finite, got {value!r}")


@dataclass(frozen=True)
class Link:
    """A class of links, all alike.

    Attributes:
        latency: seconds that a message takes however small it is.
        rate: bytes a second, in each direction.
        shared: the share of its rate that is left where several messages go through an end of it
            at once.
    """

    latency: float
    rate: float
    shared: float = 1.0

    def __post_init__(self) -> None:
        check_positive(asdict(self), zero=("latency",))
        if self.shared > 1:
            raise ValueError(f"shared must be at most 1, got {self.shared}")

    def seconds(self, nbytes: ArrayLike) -> Floats:
        """Return the seconds of messages of so many bytes; an empty one is not sent."""
        nbytes = np.asarray(nbytes, np.float64)
        return np.where(nbytes > 0, self.latency + nbytes / self.rate, 0.0)


@dataclass(frozen=True)
class Recurrent:
    """The seconds of causal linear attention, forward and backward.

    Attributes:
        call: (2,) of a call, whatever it computes.
        row: (2,) of a token, however many heads there are.
        token: (2,) of a token in each head of keys and values, of head dim `head_dim`.
        head_dim: what was measured; other head dims cost in proportion.
    """

    call: tuple[float, float]
    row: tuple[float, float]
    token: tuple[float, float]
    head_dim: int

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
        """Return the seconds of one layer over so many tokens, without those of the call."""
        width = heads * (key_dim + value_dim) / (2 * self.head_dim)
        each = self.row[backward] + self.token[backward] * width
        return np.asarray(tokens, np.float64) * each


@dataclass(frozen=True)
class Device:
    """One device: a GPU, or a core that one rank computes on.

    Attributes:
        name: what it is.
        memory: bytes.
        matmul_rate: FLOP/s of dense matrix products in `dtype`, at most.
        matmul_share: what linear modules reach of that, between 0 and 1.
        memory_bandwidth: bytes a second.
        dtype: of weights and activations.
        attention: the measured seconds of softmax attention.
        recurrent: those of linear attention.
        new_memory: seconds a byte that memory takes to be set aside, beside what is done with it;
            0 where torch keeps memory that is freed, as it does on GPUs.
        operator: seconds that an operator of torch takes to be called; 0 where the host is ahead of
            the device.
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
        """Bytes of an element of `dtype`."""
        return ITEMSIZES[self.dtype]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain numbers, for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        parts = {"attention": self.attention.as_dict(), "recurrent": asdict(self.recurrent)}
        return values | parts

    @classmethod
    def from_dict(cls, values: Any) -> Device:
        """Make a device from what `as_dict` returned; raise a ValueError that names a field."""
        if not isinstance(values, dict):
            raise ValueError(f"device must be an object with fields, got {values!r}")
        parts = {
            "attention": build(Grid, "device.attention", values.get("attention")),
            "recurrent": build(Recurrent, "device.recurrent", values.get("recurrent")),
        }
        return build(cls, "device", values | parts)


def build(cls: Any, where: str, values: Any) -> Any:
    """Return cls(**values); raise a ValueError that names a missing, unknown or wrong field."""
    if not isinstance(values, dict):
        raise ValueError(f"{where} must be an object with fields, got {values!r}")
    known = {x.name: x.default is MISSING for x in fields(cls)}
    needed = {name for name, must in known.items() if must}
    for what, names in (("lacks", needed - set(values)), ("has an unknown", {*values} - {*known})):
        if names:
            raise ValueError(f"{where} {what} field {sorted(names)[0]!r}")
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
