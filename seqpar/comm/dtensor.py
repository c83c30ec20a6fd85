"""Convert arguments of attention from DTensors to tensors of local heads, and results back to
DTensors.

With tensor parallelism, each rank holds some of the heads, and calls attention with these heads.
The group of this call consists of the ranks that hold the same heads of different tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


_PLAIN = {Tensor, nn.Parameter, type(None), float}  # types of most arguments, and not DTensors


class HeadPlacement:
    """How the heads are sharded over a tensor-parallel mesh.

    The mesh is None if the operands are not DTensors.
    """

    def __init__(self, mesh: DeviceMesh | None = None, sharded: tuple[bool, ...] = ()) -> None:
        self.mesh, self._sharded = mesh, sharded

    @classmethod
    def of(cls, q: DTensor, heads_dim: int) -> HeadPlacement:
        """Return the placement of q's heads. Raise a ValueError if q is sharded in a dimension that
        is not `heads_dim`.
        """
        sharded = tuple(placement.is_shard() for placement in q.placements)
        found = cls(q.device_mesh, sharded)
        found.check("q", q, heads_dim)
        return found

    def check(self, name: str, x: Tensor, heads_dim: int) -> None:
        """Raise a ValueError unless `x` is a DTensor with evenly sharded heads and with the
        placement of q.
        """
        if x.dim() < max(1, -heads_dim):
            found = f"shape {tuple(x.shape)}"
            raise ValueError(f"{name} must have heads, since q is a DTensor, got {found}")
        expected = self.placements(x.dim(), heads_dim)
        if not is_dtensor(x):
            raise ValueError(f"{name} must be a DTensor like q, of placements {expected}")
        if x.device_mesh != self.mesh or x.placements != expected:  # type: ignore[attr-defined]
            found = f"{x.placements} on {x.device_mesh}"  # type: ignore[attr-defined]
            wanted = f"{expected} on q's mesh: only its heads, dim {heads_dim}, may be sharded"
            raise ValueError(f"{name} must have placements {wanted}, got {found}")
        assert self.mesh is not None
        for i, sharded in enumerate(self._sharded):
            if sharded and x.shape[heads_dim] % self.mesh.size(i):
                multiple = f"a multiple of the mesh's {self.mesh.size(i)} ranks"
                wanted = f"a number of heads that is {multiple}"
                raise ValueError(f"{name} must have {wanted}, got {x.shape[heads_dim]}")

    def placements(self, dims: int, heads_dim: int) -> tuple[Placement, ...]:
        from torch.distributed.tensor import Replicate, Shard

        return tuple(Shard(heads_dim % dims) if x else Replicate() for x in self._sharded)

    def restore(self, x: Tensor, heads_dim: int) -> Tensor:
        """Return a local result as a DTensor if the operands were DTensors."""
        if self.mesh is None:
            return x
        from torch.distributed.tensor import DTensor

        placements = self.placements(x.dim(), heads_dim)
        return DTensor.from_local(x, self.mesh, placements, run_check=False)


def local_heads(tensors: Mapping[str, tuple[Any, int]]) -> tuple[list[Any], HeadPlacement]:
    """Return this rank's local tensors for the arguments of a call, and the placement of their
    heads.

    If one tensor is a DTensor, all tensors must be DTensors. Raises a ValueError if the heads of a
    tensor are not distributed over the mesh like the heads of q, or if a tensor is sharded along
    another dimension.

    Args:
        tensors: for each argument name, the argument and the index of its dimension of heads. The
            first name must be "q". Arguments that are not tensors are returned unchanged.
    """
    values = [x for x, _ in tensors.values()]
    if _PLAIN.issuperset(map(type, values)) or not any(map(is_dtensor, values)):
        return values, HeadPlacement()
    (q, heads_dim), *_ = tensors.values()
    if not is_dtensor(q):
        name = next(name for name, (x, _) in tensors.items() if is_dtensor(x))
        raise ValueError(
            f"{name} must be a plain tensor, like q, got a DTensor: pass {name}.to_local(), or "
            "make q a DTensor too"
        )
    placement = HeadPlacement.of(q, heads_dim)
    for name, (x, dim) in tensors.items():
        if isinstance(x, Tensor) and (x.dim() or x.requires_grad or is_dtensor(x)):
            placement.check(name, x, dim)
    return [x.to_local() if is_dtensor(x) else x for x in values], placement


def is_dtensor(x: object) -> bool:
    if type(x) in _PLAIN or not isinstance(x, Tensor):
        # DTensor is imported only here, because the import takes long and is rarely needed
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def local_block(x: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
    """Return the part of a tensor that this rank holds, and the index of the first element of the
    part.

    The result is None if the part is a partial sum, or is interleaved with the parts of other
    ranks.
    """
    if not is_dtensor(x):
        return x, (0,) * x.dim()
    from torch.distributed.tensor import Replicate, Shard

    offsets, sizes = [0] * x.dim(), list(x.shape)
    coordinate = x.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    for i, placement in enumerate(x.placements):  # type: ignore[attr-defined]
        if type(placement) is Shard:
            dim = placement.dim
            chunk = -(-sizes[dim] // x.device_mesh.size(i))  # type: ignore[attr-defined]
            start = min(chunk * coordinate[i], sizes[dim])
            offsets[dim] += start
            sizes[dim] = min(chunk, sizes[dim] - start)
        elif type(placement) is not Replicate:
            return None
    local = x.to_local()  # type: ignore[attr-defined]
    return (local, tuple(offsets)) if list(local.shape) == sizes else None
