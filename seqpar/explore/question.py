"""Question: what is asked about, which is what an address or a command line can say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any
from urllib.parse import urlencode

import numpy as np
import torch

from seqpar.core.arguments import as_int
from seqpar.costs.cluster import Cluster
from seqpar.layout.layout import Layout
from seqpar.simulate.candidates import STRATEGIES, Candidate

MESHES = ("mesh", "usp")  # the strategies on a 2-D mesh
LAYOUTS = ("zigzag", "contiguous", "striped")
DTYPES = ("bfloat16", "float16", "float32")
MAX_TOKENS, MAX_DOCUMENTS, MAX_RANKS = 2**22, 1024, 64
MAX_PARTS = 2**12  # ranks² × documents: larger answers take more than seconds
SAME = "same"  # of a cluster: one node of as many H100 as there are ranks


@dataclass(frozen=True)
class Question:
    """A call of attention over ranks; a fault raises a ValueError that names the field.

    Attributes:
        lengths: tokens of each document, "6000,2192"; "4096x3" stands for three of 4,096.
        ranks: how many there are.
        strategy: the name of one of softmax attention.
        layout: how documents are cut: "zigzag", "contiguous" or "striped".
        mesh: of "mesh" and "usp", the ranks of a row.
        heads, kv_heads, head_dim: of q, and of k and v.
        window: how many keys before its own a query sees; −1: all.
        causal: "yes" or "no".
        dtype: of q, k and v.
        cluster: the name of a preset, as "4x8-h100"; "same": one node of H100.
    """

    lengths: str = "20000,8192,4096,480"
    ranks: int = 4
    strategy: str = "ring"
    layout: str = "zigzag"
    mesh: int = 2
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    window: int = -1
    causal: str = "yes"
    dtype: str = "bfloat16"
    cluster: str = SAME

    def __post_init__(self) -> None:
        for name, least, most in (
            ("ranks", 1, MAX_RANKS), ("mesh", 1, MAX_RANKS), ("heads", 1, 1024),
            ("kv_heads", 1, 1024), ("head_dim", 1, 1024), ("window", -1, MAX_TOKENS),
        ):  # fmt: skip
            object.__setattr__(self, name, as_int(name, getattr(self, name), least, most))
        for name, known in (
            ("strategy", STRATEGIES), ("layout", LAYOUTS), ("causal", ("yes", "no")),
            ("dtype", DTYPES),
        ):  # fmt: skip
            if getattr(self, name) not in known:
                got = getattr(self, name)
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {got!r}")
        if (parts := self.ranks**2 * len(self.documents())) > MAX_PARTS:
            expected = f"so few that ranks² × documents is at most {MAX_PARTS:,}"
            raise ValueError(f"ranks and lengths must be {expected}, got {parts:,}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of {self.kv_heads}, got {self.heads}")
        if self.strategy in MESHES and self.ranks % self.mesh:
            raise ValueError(f"mesh must divide {self.ranks} ranks, got {self.mesh}")
        if self.on().nodes * self.on().devices_per_node < self.ranks:
            raise ValueError(f"cluster must have {self.ranks} devices, got {self.cluster}")
        if self.on().nodes > MAX_RANKS:
            raise ValueError(f"cluster must have at most {MAX_RANKS} nodes, got {self.cluster}")

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> Question:
        """Return what texts ask, as those of an address; what is not among them is by default."""
        found: dict[str, Any] = {}
        known = {field.name: int if field.type == "int" else str for field in fields(cls)}
        for name, text in texts.items():
            if name not in known:
                raise ValueError(f"{name} is no field; there are {', '.join(known)}")
            try:
                found[name] = known[name](text.strip())
            except ValueError:
                raise ValueError(f"{name} must be a number, got {text!r}") from None
        return cls(**found)

    def documents(self) -> list[int]:
        """Return the tokens of each document."""
        found: list[int] = []
        for word in self.lengths.replace(",", " ").split():
            length, _, times = word.partition("x")
            if not length.isdecimal() or (times and not times.isdecimal()) or word.endswith("x"):
                raise ValueError(f"lengths must be like 4096,512 or 4096x3, got {word!r}")
            if int(times or 1) > MAX_DOCUMENTS - len(found):
                raise ValueError(f"lengths must be of at most {MAX_DOCUMENTS} documents")
            found += [int(length)] * int(times or 1)
        if not 0 < sum(found) <= MAX_TOKENS:
            raise ValueError(f"lengths must be 1 to {MAX_TOKENS:,} tokens, got {sum(found):,}")
        return found

    def on(self) -> Cluster:
        """Return the cluster."""
        name = (
            f"1x{min(self.ranks, 8)}-h100" if self.ranks <= 8 else f"{-(-self.ranks // 8)}x8-h100"
        )
        try:
            return Cluster.preset(name if self.cluster == SAME else self.cluster)
        except ValueError as error:
            raise ValueError(f"cluster: {error}") from None

    def laid_out(self) -> Layout:
        """Return the layout."""
        cu_seqlens = np.cumsum([0, *self.documents()])
        layout: Layout = getattr(Layout, self.layout)(cu_seqlens, self.ranks)
        return layout

    def candidate(self) -> Candidate:
        """Return the strategy with its mesh."""
        shape = (self.ranks // self.mesh, self.mesh) if self.strategy in MESHES else None
        return Candidate(self.strategy, shape)

    def call(self) -> dict[str, Any]:
        """Return the call's options."""
        right = 0 if self.causal == "yes" else -1
        return {"causal": self.causal == "yes", "window_size": (self.window, right)}

    def torch_dtype(self) -> torch.dtype:
        """Return the dtype."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def address(self) -> str:
        """Return the part of an address that asks this: what is not by default."""
        given = asdict(self).items()
        return urlencode({name: x for name, x in given if x != getattr(Question, name)})
