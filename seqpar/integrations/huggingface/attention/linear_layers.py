"""Softmax layers of a model that are turned into linear attention, as in Linear-Llama3.

A hybrid model of mostly linear layers continues training from the weights of the softmax layers
(Sun et al., "LASP-2", 2025: LASP-2H).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from seqpar.core.arguments import as_int
from seqpar.integrations.huggingface.attention.call import EnabledModel
from seqpar.integrations.huggingface.attention.masks import MaskShape
from seqpar.layout.layout import Layout
from seqpar.strategies.lasp2 import LASP2Attention

FeatureMap = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class LinearLayer:
    """The linear attention that a layer computes in place of softmax attention."""

    attention: LASP2Attention
    feature_map: FeatureMap | None
    log_decay: Tensor | None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, scaling: float | None
    ) -> Any:
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        if self.feature_map is not None:
            q, k = self.feature_map(q), self.feature_map(k)
        return self.attention(q, k, v, layout, log_decay=self.log_decay, scale=scale)


def check_linear(shape: MaskShape, softmax_only: Mapping[str, object]) -> None:
    if shape != MaskShape(causal=True):
        raise ValueError(f"it is linear and takes only a causal mask, got {shape}")
    for name, value in softmax_only.items():
        if value:
            raise ValueError(f"it is linear and takes no {name}, which needs softmax attention")


def make_linear(
    session: EnabledModel,
    names: Iterable[int | str],
    feature_map: FeatureMap | None,
    log_decay: Tensor | None,
) -> None:
    softmax_layers = [layer for layer in session.layers.values() if layer.recurrence is None]
    by_name = {layer.name: layer for layer in softmax_layers}
    if isinstance(names, str | int):
        names = [names]
    chosen = []
    for name in names:
        if isinstance(name, str) and name in by_name:
            chosen.append(by_name[name])
        elif isinstance(name, str):
            raise ValueError(f"layers must be names or numbers of {list(by_name)}, got {name!r}")
        else:
            chosen.append(softmax_layers[as_int("layers", name, 0, len(softmax_layers) - 1)])
    attention = LASP2Attention(session.comm, check_ranks=session.check_ranks)
    for layer in chosen:
        layer.linear = LinearLayer(attention, feature_map, log_decay)
