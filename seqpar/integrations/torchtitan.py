"""Attention over ranks in torchtitan, through torchtitan's hook for overrides.

`--override.imports seqpar.integrations.torchtitan.sequence_parallel` replaces the attention of
models whose layers are torchtitan's own `GQAttention`, such as Llama's and Qwen's. This module
imports torchtitan; it is tested with torchtitan 0.3.0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import spmd_types as spmd
import torch
from spmd_types.runtime import get_partition_spec
from torch import Tensor
from torchtitan.config.override import derive, override
from torchtitan.models.common.attention import FlexAttention, GQAttention, VarlenAttention
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig

from seqpar.comm.messages.comm import Comm
from seqpar.core.compiling import outside_graphs
from seqpar.core.torch_private import version_of
from seqpar.integrations.dealt_chunks import head_and_tail, layout_of_chunks
from seqpar.layout.layout import Layout
from seqpar.strategies.registry import make_attention

__all__ = ["sequence_parallel"]

_KEY = "_seqpar_layout"  # attribute of a tensor of positions that holds its layout


class InnerAttention(Module):
    """Causal attention within documents, by a strategy over the ranks of the dimension "cp"."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # torchtitan builds an InnerAttention from it
        strategy: str = "ring"
        options: dict[str, Any] = field(default_factory=dict)
        load_balancer: str | None = "headtail"
        left: int = -1

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.strategy, self.options = config.strategy, config.options
        self.balanced, self.left = config.load_balancer is not None, config.left
        self.attention: Any = None
        self.comm: Any = None

    def parallelize(self, parallel_dims: Any) -> None:
        """Make the strategy's module on the dimension "cp". torchtitan calls this method."""
        mesh = parallel_dims.get_optional_mesh("cp", include_singleton_axes=True)
        self.attention = make_attention(self.strategy, mesh, **self.options)
        self.comm = Comm.of(mesh)
        super().parallelize(parallel_dims)

    def layout_of(self, positions: Tensor) -> Layout:
        """Return the layout of a batch, from this rank's positions (B, L_local)."""
        if self.attention is None:
            raise ValueError(
                "spmd_backend must be spmd_types or full_dtensor: otherwise, torchtitan does not "
                "tell seqpar the group"
            )
        to_local = getattr(positions, "to_local", None)  # a method of DTensors
        local = positions if to_local is None else to_local()
        if local.is_inference():  # has no version counter, so each layer reads it again
            with spmd.no_typecheck():
                return _layout(local, self.comm, self.balanced)
        key = id(self.comm), self.balanced, version_of(local)
        found: tuple[Any, Layout] | None = getattr(positions, _KEY, None)
        if found is None or found[0] != key:  # otherwise an earlier layer has made the layout
            with spmd.no_typecheck():
                found = key, _layout(local, self.comm, self.balanced)
            setattr(positions, _KEY, found)
        return found[1]

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Layout,
        scale: float | None = None,
        enable_gqa: bool = False,
        **others: Any,
    ) -> Tensor:
        """Return (B, L_local, N, H) from this rank's q, k and v; `attention_masks` is a layout."""
        if given := sorted(name for name, value in others.items() if value is not None):
            raise ValueError(f"{', '.join(given)} must not be given to attention over ranks")
        with spmd.no_typecheck():
            packed = (x.flatten(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH))
            options = {"causal": True, "window_size": (self.left, -1), "softmax_scale": scale}
            out: Tensor = self.attention(*packed, attention_masks, **options)
            out = out.unflatten(0, q_BLNH.shape[:2])
        if spmd.is_type_checking():
            spmd.assert_type(out, spmd.get_local_type(q_BLNH), get_partition_spec(q_BLNH))
        return out


class Attention(GQAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):  # torchtitan builds an Attention from it
        pass

    def forward(
        self, x_BLD: Tensor, attention_masks: Any, positions: Tensor | None = None
    ) -> Tensor:
        if attention_masks is not None:
            raise ValueError("attention_masks must be None, since positions show the documents")
        if positions is None:
            raise ValueError("positions must be given, since they show the documents, got None")
        layout = self.inner_attention.layout_of(positions)
        return super().forward(x_BLD, layout, positions)


@override(  # type: ignore[untyped-decorator]
    target=GQAttention.Config, exact=True, description="attention over ranks, by seqpar"
)
def sequence_parallel(
    cfg: Any,
    *,
    strategy: str = "ring",
    load_balancer: str | None = "headtail",
    **options: Any,
) -> Any:
    """Replace an attention block's config, for `--override.imports`.

    Args:
        cfg: torchtitan's config, with flex or varlen attention.
        strategy: as in `seqpar.make_attention`; `options` are the strategy's.
        load_balancer: torchtitan's `--parallelism.context_parallel_load_balancer`, "headtail" or
            None, which decides the tokens of each rank.

    Raises:
        ValueError: if the block's attention is neither flex nor varlen attention, or if
            `load_balancer` is neither "headtail" nor None.
    """
    if load_balancer not in ("headtail", None):
        raise ValueError(f"load_balancer must be 'headtail' or None, got {load_balancer!r}")
    inner, left = cfg.inner_attention, -1
    if isinstance(inner, VarlenAttention.Config):
        left, right = inner.window_size
        if right != 0:
            raise ValueError(f"window_size must end at the query, got {inner.window_size}")
    elif not isinstance(inner, FlexAttention.Config):
        kind = type(inner).__qualname__
        raise ValueError(f"inner_attention must be flex or varlen attention, got {kind}")
    made = InnerAttention.Config(
        strategy=strategy,
        options=options,
        load_balancer=load_balancer,
        left=left,
        sharding_config=_where_tokens_are(inner.sharding_config),
    )
    return derive(cfg, Attention.Config, inner_attention=made)


def _where_tokens_are(sharding: Any) -> Any:
    """Return the sharding config of inner attention, changed such that torchtitan does not gather
    keys and values.
    """
    if sharding is None:
        return None
    held = sharding.in_src_shardings
    return ShardingConfig(
        in_src_shardings=held,
        in_dst_shardings=held,
        out_src_shardings=sharding.out_src_shardings,
        local_map=LocalMapConfig(in_grad_placements=tuple(held.values())),
    )


@outside_graphs
def _layout(positions: Tensor, comm: Comm, balanced: bool) -> Layout:
    parts = comm.all_gather(positions.to(comm.device), label="positions")
    ranks, (rows, held) = comm.size, positions.shape
    balanced = balanced and ranks > 1  # torchtitan does not reorder the tokens of one rank
    if balanced and held % 2:
        expected = f"a multiple of {2 * ranks}, two chunks for each rank"
        raise ValueError(f"seq_len must be {expected}, with headtail, got {held * ranks}")
    dealt = torch.stack(parts).cpu().numpy()  # (P, B, L_local)
    owners = head_and_tail(ranks) if balanced else np.arange(ranks)
    size = held * ranks // owners.size
    chunks = [
        dealt[owner, :, size * (i >= ranks) :][:, :size] for i, owner in enumerate(owners.tolist())
    ]
    whole = np.concatenate(chunks, 1)
    begins = whole == 0
    steps = whole[:, 1:] == whole[:, :-1] + 1
    if not (begins[:, 0].all() and (steps | begins[:, 1:]).all()):
        named = "headtail" if balanced else "None"
        reason = "with which the ranks' positions do not count up from 0 in each document"
        found = f"{named}, {reason}"
        raise ValueError(f"load_balancer must be that of torchtitan's config, got {found}")
    tokens = rows * held * ranks
    cu_seqlens = np.r_[np.flatnonzero(begins), tokens]
    return layout_of_chunks(np.arange(0, tokens + 1, size), owners, ranks, cu_seqlens)
