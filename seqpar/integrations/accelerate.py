"""Attention over ranks under accelerate's `ParallelismConfig(cp_size=...)`.

accelerate makes a mesh of ranks, gives the ranks that share a sequence the same batches, and shards
the weights over these ranks. accelerate then also adds torch's own context parallelism to the
model. `sequence_mesh` prevents only this last step. This module is tested with accelerate 1.15.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from seqpar.comm.messages.comm import DeviceMesh
from seqpar.core.private_names import PrivateNames, Use

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["sequence_mesh"]

_ACCELERATE = PrivateNames(
    "accelerate",
    names={
        "accelerate.Accelerator._prepare_cp": Use(
            "1.10",
            "it is replaced, because it would hook torch's attention over ranks into a model",
        ),
    },
    attributes={
        "_models": Use("1.0", "to refuse an Accelerator that has already prepared a model"),
    },
)


def sequence_mesh(accelerator: Accelerator) -> DeviceMesh:
    """Return the mesh of the ranks that share each sequence, and keep accelerate from adding
    torch's own context parallelism to the model.

    Pass the mesh to `huggingface.enable`, or to `make_attention` if you wrote the model yourself.
    Then call `accelerator.prepare` as usual. The prepared data loader gives the same batches to all
    ranks of the mesh. Different meshes receive different batches. FSDP2 shards the weights over the
    dimensions `dp_shard` and `cp` together, and averages gradients over all ranks.

    Afterwards, `accelerator.maybe_context_parallel` raises a ValueError, because `sp.shard` or a
    layout cuts the batch instead. A second call of `sequence_mesh` returns the same mesh.
    `sequence_mesh` sends no messages.

    Args:
        accelerator: an Accelerator with a `ParallelismConfig` whose `cp_size` is at least 2, before
            it prepares a model.

    Returns:
        mesh: the dimension "cp" of the Accelerator's mesh, with `cp_size` ranks.

    Raises:
        ValueError: if the Accelerator has no `cp_size`, has prepared a model, or shares sequences
            with DeepSpeed (`sp_size`).
    """
    config = getattr(accelerator, "parallelism_config", None)
    if config is None or not config.cp_enabled:
        size = None if config is None else config.cp_size
        how = "pass parallelism_config=ParallelismConfig(cp_size=...) with at least 2 ranks"
        raise ValueError(f"accelerator must have a cp_size of at least 2, got {size}: {how}")
    mesh: DeviceMesh = accelerator.torch_device_mesh["cp"]
    if vars(accelerator).get("_prepare_cp") is _as_they_are:
        return mesh
    if _ACCELERATE.read(accelerator, "_models"):
        reason = "torch's attention is hooked into the model"
        way_out = "call sequence_mesh before accelerator.prepare"
        raise ValueError(f"accelerator must not have prepared a model: {reason}; {way_out}")
    _ACCELERATE.check()
    changed: Any = accelerator
    changed._prepare_cp, changed.maybe_context_parallel = _as_they_are, _refuse
    return mesh


def _as_they_are(*objects: Any) -> tuple[Any, ...]:
    return objects


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    what = "maybe_context_parallel must not be called after sequence_mesh(accelerator)"
    how = "cut the batch with sp.shard, or with a layout's shard"
    raise ValueError(f"{what}: it cuts batches for torch's attention; {how}")
