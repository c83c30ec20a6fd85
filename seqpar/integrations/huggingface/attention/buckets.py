"""T5's relative positions: a bias of the scores that depends on the distance of the key.

All keys of a bucket of distances share one bias for each head. A layer therefore attends to each
bucket by itself, without a bias, adds the bias to the bucket's lse, and merges the buckets (Raffel
et al., "Exploring the Limits of Transfer Learning", 2020, section 2.1).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqpar.integrations.huggingface.attention.masks import MaskShape
from seqpar.integrations.huggingface.batch.documents import BatchDocuments
from seqpar.integrations.huggingface.model.code import has_buckets, takes
from seqpar.integrations.huggingface.model.patched_globals import Removable, Replaced
from seqpar.layout.masks.mask import Mask
from seqpar.softmax.compute.merge import merge

BandMasks = list[tuple[int, Mask]]  # (number of the band, its mask)


class Band(NamedTuple):
    """A bucket's distances of the key minus the query, low … high; None is unlimited."""

    low: int | None
    high: int | None
    bucket: int


def bands_of(layer: Any) -> list[Band]:
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
    found, stop = [], 0
    for bucket, same in groupby(buckets):
        start, stop = stop, stop + len(list(same))
        low = None if start == 0 else start - last
        high = None if stop == len(buckets) and not layer.is_decoder else stop - 1 - last
        found.append(Band(low, high, bucket))
    return found


def add_bucket_hooks(model: nn.Module) -> list[Removable]:
    """Make layers pass on one bias for each band, (1, H, 1, bands), not one for each pair."""
    handles: list[Removable] = []
    for x in model.modules():
        if not has_buckets(x):
            continue
        if x.has_relative_attention_bias:
            handles.append(Replaced(x, "compute_bias", _bias_by_band(x)))
        elif takes(x, "position_bias"):
            handles.append(x.register_forward_pre_hook(_without_bias, with_kwargs=True))
    return handles


def _bias_by_band(layer: Any) -> Callable[..., Tensor]:
    buckets = torch.tensor([band.bucket for band in bands_of(layer)])

    def compute_bias(*args: Any, **kwargs: Any) -> Tensor:
        table = layer.relative_attention_bias
        values: Tensor = table(buckets.to(table.weight.device))
        return values.t()[None, :, None]

    return compute_bias


def _without_bias(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("position_bias") is None:
        weight = next(layer.parameters())
        kwargs = kwargs | {"position_bias": weight.new_zeros(1, layer.n_heads, 1, 0)}
    return args, kwargs


def masks_of(
    layer: Any, bias: Tensor, shape: MaskShape, batch: BatchDocuments, known: dict[bool, BandMasks]
) -> BandMasks:
    """Return (band, mask) for each band in which tokens of a batch attend to each other.

    `known` keeps the result for all layers of the encoder or decoder. Raises a ValueError if the
    bias (1, H, 1, bands) or the mask does not belong to these bands.
    """
    bands = bands_of(layer)
    if shape != MaskShape(causal=layer.is_decoder):
        raise ValueError(f"its scores have a bias by distance, and its mask is {shape}")
    if tuple(bias.shape) != (1, layer.n_heads, 1, len(bands)):
        shape_of_bias = tuple(bias.shape)
        raise ValueError(f"its bias of shape {shape_of_bias} does not come from its own buckets")
    if layer.is_decoder not in known:
        lengths = [stop - start for _, start, stop in batch.squares()]
        far = max(lengths) - 1
        known[layer.is_decoder] = [
            (j, Mask.of_ranges([(i, 0, n, 0, n, low, high) for i, n in enumerate(lengths)]))
            for j, (low, high, _) in enumerate(bands)
            if (low is None or low <= far) and (high is None or -far <= high)
        ]
    return known[layer.is_decoder]


def attend_in_buckets(bias: Tensor, masks: BandMasks, attend: Callable[..., Any]) -> Tensor:
    """Return out (1, T_local, H, D); `attend(mask=…, return_lse=True)` computes a band."""
    outs, lses = [], []
    for band, mask in masks:
        out, lse = attend(mask=mask, return_lse=True)
        outs.append(out)
        lses.append(lse + bias[0, :, 0, band].to(lse.dtype))
    return merge(outs, lses)[0]
