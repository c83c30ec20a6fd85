"""Real ranks on NCCL, a GPU each or all on one, against the oracle."""

import os
import tempfile

import pytest
import torch
import torch.distributed as dist

from seqpar import Layout
from seqpar.attention.backend import DEFAULT
from tests.support import cases, linear_cases
from tests.support.cases import STRATEGIES, Case
from tests.support.linear_cases import LinearCase

RANKS = 2
WITH_A_MESH = ("mesh", "usp")
GPUS = torch.cuda.device_count()
DOCUMENTS = [0, 700, 701, 1500]
OPTIONS = {"dim": 64, "value_dim": 64, "heads": 8, "kv_heads": 4, "dtype": torch.bfloat16}
# NCCL refuses two ranks of one host on one GPU. With these, and with another NCCL_HOSTID for each
# rank, it takes them for ranks of two hosts, which only have the network between them.
NO_NEIGHBOURS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


def be_a_rank(rank, store, made, gpus=RANKS):
    """Make all calls, in one order on all ranks; rank 0 holds them to the oracle."""
    if gpus < RANKS:
        os.environ |= NO_NEIGHBOURS | {"NCCL_HOSTID": f"host{rank}"}
    device = torch.device("cuda", rank % gpus)
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


def spawn(*arguments):
    """Be all ranks, each a process."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(be_a_rank, (f"{folder}/store", *arguments), RANKS)


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
@pytest.mark.timeout(60)
def test_two_processes_share_a_gpu():
    """The default path of every strategy without a mesh, on NCCL."""
    layout = Layout.zigzag(DOCUMENTS, RANKS)
    made = [
        Case(strategy, layout, causal=True, backend=DEFAULT, device="cuda", **OPTIONS)
        for strategy in STRATEGIES
        if strategy not in WITH_A_MESH
    ]
    spawn(made, 1)


@pytest.mark.skipif(GPUS < RANKS, reason=f"needs {RANKS} GPUs on one machine")
@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "striped"])
def test_every_strategy_on_nccl(kind):
    layout = getattr(Layout, kind)(DOCUMENTS, RANKS)
    made = [
        Case(strategy, layout, causal=True, backend=backend, device="cuda", **OPTIONS)
        for strategy in STRATEGIES
        if strategy not in WITH_A_MESH
        for backend in ("triton", "aten")
    ]
    if kind != "striped":
        made += [
            LinearCase(layout, transport=transport, backend="triton", device="cuda", **OPTIONS)
            for transport in ("all_gather", "scan")
        ]
    spawn(made)
