"""Spread the sequences of a model over ranks: what users call first."""

from __future__ import annotations

from typing import Any

from torch import nn

from seqpar.comm.messages.exchange import Group
from seqpar.integrations.huggingface.session import SequenceParallel


def enable(
    model: nn.Module,
    group_or_mesh: Group,
    strategy: str = "ring",
    *,
    layout: str = "zigzag",
    check_ranks: bool = True,
    **options: Any,
) -> SequenceParallel:
    """Spread the sequences of a transformers model over the ranks of a group.

    Afterwards each rank gives the same batch to `shard`, and calls the model with what that
    returns. Its attention then sees the keys of all ranks; everything else is computed on a rank's
    own tokens.

    It needs transformers 5: `pip install 'seqpar[hf]'`, and with TRL also `'seqpar[trl]'`. For
    training, `seqpar.integrations.huggingface.trainer` takes transformers' `Trainer` and
    `Seq2SeqTrainer`, and TRL's `SFTTrainer`.

    Args:
        model: a `PreTrainedModel`, or a module that has one inside, such as DDP's or PEFT's. Wrap
            it in PEFT before and in DDP or FSDP before or after.
        group_or_mesh: what the strategy takes: a process group, or for "mesh" and "usp" a 2-D
            DeviceMesh.
        strategy: as in `seqpar.make_attention`. "auto" needs `'seqpar[plan]'`, and without the
            option `cluster` rank 0 first measures its machine, for up to `measure_seconds`.
        layout: "zigzag", "striped" or "contiguous", of which `shard` makes the layouts.
        check_ranks: let ranks compare their calls, so that a fault of one raises on all.
        options: the strategy's.

    Returns:
        sp: `sp.shard(batch)`, `sp.unshard(outputs)`, `sp.report()` and `sp.disable()`. With labels
        in the batch, the model's outputs have the mean loss of all its labels, the same number on
        all ranks. After `loss.backward()` each parameter has that loss's gradient on every rank.
        DDP or FSDP average it over ranks that include the group, if they have the parameter, and
        seqpar sums it over the group otherwise, before its hooks run. Each call of the model finds
        out which it is. A loss of your own must come from `sp.total`.

    Raises:
        ValueError: if layers of the model cannot be computed so; it names them, and says why. Also
            if the model's weights are not the same on all ranks; it names the first.
        TypeError: if the strategy does not have an option.
        ImportError: if transformers is not installed, or for "auto" simpy.
    """
    if layout not in ("zigzag", "striped", "contiguous"):
        raise ValueError(f"layout must be zigzag, striped or contiguous, got {layout!r}")
    return SequenceParallel(
        model, group_or_mesh, strategy, layout, check_ranks=check_ranks, **options
    )
