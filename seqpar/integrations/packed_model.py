"""A transformers model that runs over ranks, while a training framework computes its loss.

The integrations of Automodel and verl use this module. Each batch is one row of packed documents.
The framework computes the loss from each rank's outputs, and sums or averages gradients over the
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.comm.messages.comm import Group
from seqpar.core.arguments import Ints, shown
from seqpar.integrations.huggingface.batch.documents import CU_SEQLENS
from seqpar.integrations.huggingface.batch.sharding import KEY, Sharding
from seqpar.integrations.huggingface.session import SequenceParallel
from seqpar.layout.layout import Layout

KINDS = ("zigzag", "striped", "contiguous")
# The kind of the layouts, or a function from a batch's cu_seqlens to its layout.
LayoutMaker = str | Callable[[Ints], Layout]


@dataclass(frozen=True)
class PackedPart:
    """One rank's part of a packed batch (1, T, …): `inputs` are arguments of the model's call."""

    inputs: dict[str, Any]
    layout: Layout
    rank: int
    tokens: int  # T, without the layout's padding

    def cut(self, x: Tensor, value: float = 0, dim: int = 1) -> Tensor:
        """Return this rank's tokens of another tensor of the batch; padding gets `value`."""
        return self.layout.shard(x, self.rank, dim, value)

    def join(self, x: Tensor, group: Group, dim: int = 1) -> Tensor:
        """Gather all ranks' rows of x, without padding. Backward sums all ranks' gradients."""
        return self.layout.unshard(x, group, dim).narrow(dim, 0, self.tokens)


class PackedModel:
    def __init__(
        self,
        model: nn.Module,
        group: Group,
        strategy: str,
        layout: LayoutMaker,
        options: Mapping[str, Any],
    ) -> None:
        if not callable(layout) and layout not in KINDS:
            expected = f"{', '.join(KINDS)}, or a function of cu_seqlens"
            raise ValueError(f"layout must be {expected}, got {shown(layout)}")
        self._layout = layout
        kind = layout if isinstance(layout, str) else KINDS[0]
        self.sp = SequenceParallel(model, group, strategy, kind, **{"check_ranks": True, **options})
        self.sp.framework_losses = True

    def shard(self, inputs: Mapping[str, Tensor], cu_seqlens: Ints) -> PackedPart:
        with self.sp.faults():
            layout = None if isinstance(self._layout, str) else self._layout(cu_seqlens)
        offsets = torch.from_numpy(cu_seqlens)
        batch = {**inputs, **dict.fromkeys(CU_SEQLENS, offsets), "use_cache": False}
        made = dict(self.sp.shard(batch, layout))
        del made["use_cache"]  # the session sets it in each call
        sharding: Sharding = made[KEY]
        side = sharding.main
        return PackedPart(made, side.layout, self.sp.comm.rank, int(cu_seqlens[-1]))
