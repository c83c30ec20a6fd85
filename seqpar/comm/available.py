"""The backends for messages in this build of torch."""

import torch.distributed as dist


def available() -> dict[str, bool]:
    """Return the names of backends, each with whether this build of torch has it."""
    found = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
        "ucc": dist.is_ucc_available,
    }
    return {name: bool(is_here()) for name, is_here in found.items()}
