"""Biases of scores by the distance of the key, in buckets: T5's relative positions.

All keys of a bucket have one bias, a number for each head. So attention over them alone is what it
is without a bias, and its lse is greater by that number. A layer attends to the keys of each bucket
by itself, as a band of distances, and merges (Raffel et al., "Exploring the Limits of Transfer
Learning", 2020: section 2.1). The bias has its gradient from the lse.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from seqpar.integrations.huggingface.attention.masks import MaskShape
from seqpar.integrations.huggingface.batch.documents import BatchDocuments
from seqpar.integrations.huggingface.model.code import has_buckets
from seqpar.layout.masks.mask import Mask
from seqpar.softmax.compute.merge import merge

BandMasks = list[tuple[int, Mask]]  # of bands, by their number


class Band(NamedTuple):
    """The distances low … high of a bucket, of a key behind its query; None is without limit."""

    low: int | None
    high: int | None
    bucket: int


def bands_of(layer: Any) -> list[Band]:
    """Return the bands of a layer, by its own function of distances."""
    last = int(layer.relative_attention_max_distance) + 1
    bucket_of = layer._relative_position_bucket
    options = {}
    if "bidirectional" in inspect.signature(bucket_of).parameters:
        options = {
            "bidirectional": not layer.is_decoder,
            "num_buckets": layer.relative_attention_num_buckets,
            "max_distance": layer.relative_attention_max_distance,
        }
    distances = torch.arange(-last, 1 if layer.is_decoder else last + 1)
    buckets = bucket_of(distances, **options).tolist()
    starts = [i for i in range(len(buckets)) if i == 0 or buckets[i] != buckets[i - 1]]
    found = []
    for start, stop in zip(starts, [*starts[1:], len(buckets)], strict=True):
        low = None if start == 0 else start - last
        high = None if stop == len(buckets) and not layer.is_decoder else stop - 1 - last
        found.append(Band(low, high, buckets[start]))
    return found


def add_bucket_hooks(model: nn.Module) -> list[RemovableHandle | _Restored]:
    """Make layers pass on the biases of their buckets, (1, H, 1, bands), not one for each pair."""
    handles: list[RemovableHandle | _Restored] = []
    for x in model.modules():
        if not has_buckets(x):
            continue
        if x.has_relative_attention_bias:
            handles.append(_Restored(x))
        elif "position_bias" in inspect.signature(type(x).forward).parameters:
            handles.append(x.register_forward_pre_hook(_without_bias, with_kwargs=True))
    return handles


class _Restored:
    """A layer's own `compute_bias`, until it is removed from where another is."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        buckets = torch.tensor([band.bucket for band in bands_of(layer)])

        def compute_bias(*args: Any, **kwargs: Any) -> Tensor:
            table = layer.relative_attention_bias
            values: Tensor = table(buckets.to(table.weight.device))
            return values.t()[None, :, None]

        layer.compute_bias = compute_bias

    def remove(self) -> None:
        """Give the layer its own function back."""
        vars(self._layer).pop("compute_bias", None)


def _without_bias(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("position_bias") is None:
        weight = next(layer.parameters())
        kwargs = kwargs | {"position_bias": weight.new_zeros(1, layer.n_heads, 1, 0)}
    return args, kwargs


def masks_of(
    layer: Any,
    bias: Tensor,
    shape: MaskShape,
    documents: BatchDocuments,
    known: dict[bool, BandMasks],
) -> BandMasks:
    """Return (band, mask) of the bands in which a batch's tokens see each other.

    `known` keeps them, as an encoder's layers have the same and a decoder's too. Raise a ValueError
    if the layer's bias (1, H, 1, bands) is not for these, or if its mask is not that of its bands.
    """
    bands = bands_of(layer)
    if shape != MaskShape(causal=layer.is_decoder):
        raise ValueError(f"its scores have a bias by distance, and its mask is {shape}")
    if tuple(bias.shape) != (1, layer.n_heads, 1, len(bands)):
        raise ValueError(f"its bias is {tuple(bias.shape)}, which it did not make itself")
    if layer.is_decoder not in known:
        lengths = [stop - start for _, start, stop in documents.squares()]
        far = max(lengths) - 1
        known[layer.is_decoder] = [
            (j, Mask.of_ranges([(i, 0, n, 0, n, low, high) for i, n in enumerate(lengths)]))
            for j, (low, high, _) in enumerate(bands)
            if (low is None or low <= far) and (high is None or -far <= high)
        ]
    return known[layer.is_decoder]


def attend_in_buckets(bias: Tensor, masks: BandMasks, attend: Callable[..., Any]) -> Tensor:
    """Return out (1, T_local, H, D), with a bias (1, H, 1, bands).

    `attend` computes attention under the mask that it is given, and returns (out, lse).
    """
    outs, lses = [], []
    for band, mask in masks:
        out, lse = attend(mask=mask, return_lse=True)
        outs.append(out)
        lses.append(lse + bias[0, :, 0, band].to(lse.dtype))
    return merge(outs, lses)[0]
