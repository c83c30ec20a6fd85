"""Real ranks on NCCL, a GPU each, against the oracle."""

import tempfile

import pytest
import torch
import torch.distributed as dist

from seqpar import Layout
from tests.support import cases, linear_cases
from tests.support.cases import STRATEGIES, Case
from tests.support.linear_cases import LinearCase

RANKS = 2
pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs on one machine"
)
DOCUMENTS = [0, 700, 701, 1500]
OPTIONS = {"dim": 64, "value_dim": 64, "heads": 8, "kv_heads": 4, "dtype": torch.bfloat16}


def be_a_rank(rank, store, made):
    """Make all calls, in one order on all ranks; rank 0 holds them to the oracle."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    file = dist.FileStore(store, RANKS)
    dist.init_process_group("nccl", store=file, rank=rank, world_size=RANKS, device_id=device)
    for case in made:
        linear = isinstance(case, LinearCase)
        of_kind = linear_cases if linear else cases
        got = of_kind.run(dist.group.WORLD, case)
        if rank == 0:
            of_kind.assert_right(got, of_kind.oracle(case), case.dtype)
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "striped"])
def test_every_strategy_on_nccl(kind):
    layout = getattr(Layout, kind)(DOCUMENTS, RANKS)
    made = [
        Case(strategy, layout, causal=True, backend=backend, device="cuda", **OPTIONS)
        for strategy in STRATEGIES
        if strategy not in ("mesh", "usp")  # which want a mesh
        for backend in ("triton", "aten")
    ]
    if kind != "striped":
        made += [
            LinearCase(layout, transport=transport, backend="triton", device="cuda", **OPTIONS)
            for transport in ("all_gather", "scan")
        ]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(be_a_rank, (f"{folder}/store", made), RANKS)
