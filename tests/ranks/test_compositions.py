"""Attention over ranks, or on servers, beside two or three other parallelisms: one process's."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import seqpar
from tests.support.examples import example
from tests.support.ranks import Pool, device_mesh
from tests.support.servers import connect, running

ROWS, EXPERTS = 4, 4
NAMES = "pp", "dp", "sp", "tp"


class Matrices(nn.Module):
    """The experts: a matrix each."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, dim, dim) / dim)

    def forward(self, rows, which):
        return torch.einsum("ti,tio->to", rows, self.weight[which])


class Experts(nn.Module):
    """Experts of which each token uses one; the ranks of a group may divide the experts."""

    def __init__(self, dim):
        super().__init__()
        self.router, self.experts = nn.Linear(dim, EXPERTS), Matrices(dim)
        self.group, self.ranks = None, 1

    def divide(self, group):
        """Keep this rank's experts. The tokens of all ranks of the group will reach them."""
        self.group, self.ranks = group, group.size()
        own = self.experts.weight.detach().chunk(self.ranks)[group.rank()]
        self.experts.weight = nn.Parameter(own.clone())

    def forward(self, x):
        rows = x.flatten(0, 1)
        weight, chosen = self.router(rows).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=EXPERTS).view(self.ranks, -1)
        arriving = self.of_other_ranks(counts)  # (ranks, own experts)
        arrived = self.exchanged(rows[order], counts.sum(1), arriving.sum(1))
        which = torch.arange(arriving.shape[1]).repeat(self.ranks)
        made = self.experts(arrived, which.repeat_interleave(arriving.flatten()))
        back = self.exchanged(made, arriving.sum(1), counts.sum(1))
        out = torch.zeros_like(rows).index_copy(0, order, back)
        return x + (out * weight[:, None]).view_as(x)

    def of_other_ranks(self, counts):
        """Return how many tokens of each rank choose each expert of this rank."""
        received = torch.empty_like(counts)
        if self.group is None:
            return counts
        dist.all_to_all_single(received, counts, group=self.group)
        return received

    def exchanged(self, rows, sent, received):
        """Send rows, which are sorted by rank, to these ranks; return the rows that arrive."""
        if self.group is None:
            return rows
        counts = received.tolist(), sent.tolist()
        return all_to_all_single_autograd(rows, *counts, self.group)


def program(experts=False):
    """The example with a batch of four rows; each block of its model may end with experts."""
    made = example("parallelisms")
    made.BATCH, made.LABELS = ROWS, ROWS * (40 - 3)
    if experts:

        class Block(made.Block):
            def __init__(self):
                super().__init__()
                self.experts = Experts(made.DIM)

            def forward(self, x, attend):
                return self.experts(super().forward(x, attend))

        made.Block = Block
    return made


def parallelize(model, mesh, sharded, of_experts):
    """Divide heads over tp, experts over `of_experts`, then shard parameters over dp and sp."""
    heads = ColwiseParallel(use_local_output=False)
    plan = {"q": heads, "k": heads, "v": heads, "out": RowwiseParallel()}
    whole, replicas = mesh["dp", "sp"], "dp" if of_experts == "sp" else "sp"
    for block in (model.parts[str(i)] for i in model.layers):
        if mesh["tp"].size() > 1:
            parallelize_module(block, mesh["tp"], plan)
        if of_experts:
            block.experts.divide(mesh[of_experts].get_group())
        if of_experts and sharded:
            fully_shard(block.experts.experts, mesh=mesh[replicas])
            block.experts.experts.set_gradient_divide_factor(whole.size())
            block.experts.experts.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply
        if sharded:
            fully_shard(block, mesh=whole)
    if sharded:
        fully_shard(model, mesh=whole)


def backward(kinds, model, mesh, rank, layout, factor):
    """Compute gradients of this rank's rows and tokens, in micro-batches if there are stages."""
    dp, pp = mesh["dp"], mesh["pp"]
    rows = slice(dp.get_local_rank(), None, dp.size())
    ids, labels = (layout.shard(x[rows], rank, dim=1) for x in kinds.batch())
    loss_of = lambda logits, labels: kinds.loss_of(logits, labels) * factor  # noqa: E731
    if pp.size() == 1:
        loss_of(model(ids), labels).backward()
        return
    index = pp.get_local_rank()
    stage = PipelineStage(model, index, pp.size(), torch.device("cpu"), group=pp.get_group())
    schedule = ScheduleGPipe(stage, n_microbatches=len(ids), loss_fn=loss_of, scale_grads=False)
    schedule.step(ids) if index == 0 else schedule.step(target=labels)


def sum_gradients(found, mesh, of_experts):
    """Sum each gradient over the ranks that hold its parameter and have other tokens.

    The ranks of the dimension `of_experts` hold other experts.
    """
    for key, gradient in found.items():
        for name in ("dp", "sp"):
            if not ("experts.weight" in key and name == of_experts):
                dist.all_reduce(gradient, group=mesh[name].get_group())


def trained(group, sizes, sharded=False, of_experts=None, addresses=()):
    """The largest difference of a gradient from one process, and the tasks of servers.

    Args:
        sizes: of the mesh.
        sharded: whether FSDP2 shards parameters.
        of_experts: the dimension whose ranks divide the experts, or None without experts.
        addresses: of the servers that compute attention, if any.
    """
    kinds = program(experts=of_experts is not None)
    mesh = device_mesh(*sizes, names=NAMES)
    pp, sp = mesh["pp"], mesh["sp"]
    layout = seqpar.Layout.zigzag(kinds.CU_SEQLENS, sp.size())
    with connect(*addresses, home=False) if addresses else contextlib.nullcontext() as servers:
        attn = seqpar.DisaggregatedAttention(servers) if servers else seqpar.RingAttention(sp)
        first = pp.get_local_rank()
        model = kinds.Model(range(2) if pp.size() == 1 else range(first, first + 1))
        model.on(attn, layout)
        parallelize(model, mesh, sharded, of_experts)
        ranks = mesh["dp"].size() * sp.size()
        backward(kinds, model, mesh, attn.rank, layout, ranks if sharded else 1)
        tasks = sum(x.tasks for x in servers.report().servers) if servers else 0
    found = kinds.gradients(model)
    if not sharded:
        sum_gradients(found, mesh, of_experts)
    _, expected = kinds.one_process()
    if of_experts:
        divided = mesh[of_experts]
        for name in (x for x in found if "experts.weight" in x):
            parts = expected[name].chunk(divided.size())
            expected[name] = parts[divided.get_local_rank()]
    return max(float((x - expected[name]).abs().max()) for name, x in found.items()), tasks


@pytest.fixture(scope="module")
def eight():
    with Pool(8) as ranks:
        yield ranks


def assert_one_process(results):
    assert max(error for error, _ in results) <= 1e-6


@pytest.mark.composes(
    "PyTorch",
    "tensor parallelism first, then FSDP2 on `mesh['dp', 'sp']`; multiply the loss by the number "
    "of its ranks",
    case="data, context, tensor",
    data=2,
    context=2,
    tensor=2,
    FSDP=4,
    equal="gradients",
)
@pytest.mark.composes(
    "PyTorch",
    "divide each stage's heads; all stages have the layout; sum gradients over context",
    case="pipeline, context, tensor",
    pipeline=2,
    context=2,
    tensor=2,
    equal="gradients",
)
@pytest.mark.composes(
    "PyTorch",
    "wrap each stage in FSDP2 on `mesh['dp', 'sp']`; multiply the loss by the number of its "
    "ranks, with `scale_grads=False`",
    case="pipeline, data, context",
    pipeline=2,
    data=2,
    context=2,
    FSDP=4,
    equal="gradients",
)
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sizes", "sharded"),
    [((1, 2, 2, 2), True), ((2, 1, 2, 2), False), ((2, 2, 2, 1), True)],
    ids=["data, context, tensor", "pipeline, context, tensor", "pipeline, data, context"],
)
def test_three_dimensions_match_one_process(eight, sizes, sharded):
    assert_one_process(eight(8, trained, sizes, sharded))


@pytest.mark.composes(
    "PyTorch",
    "each expert gets the tokens of all ranks of context, so its gradient is a sum over them "
    "already: sum the gradients of experts over data only, and all others over data and context",
    case="data",
    data=2,
    context=2,
    expert=2,
    equal="gradients",
)
@pytest.mark.composes(
    "PyTorch",
    "FSDP2 of the experts over data only, with the divisor of the other parameters: "
    "`set_gradient_divide_factor`",
    case="FSDP2",
    data=2,
    context=2,
    expert=2,
    FSDP=4,
    equal="gradients",
)
@pytest.mark.composes(
    "PyTorch",
    "all ranks of tensor send the same tokens to the experts; do not sum the experts' gradients",
    case="tensor",
    context=2,
    tensor=2,
    expert=2,
    equal="gradients",
)
@pytest.mark.composes(
    "PyTorch",
    "each stage divides its experts over context; do not sum the experts' gradients",
    case="pipeline",
    pipeline=2,
    context=2,
    expert=2,
    equal="gradients",
)
@pytest.mark.parametrize(
    ("sizes", "sharded"),
    [
        ((1, 2, 2, 1), False),
        ((1, 2, 2, 1), True),
        ((1, 1, 2, 2), False),
        ((2, 1, 2, 1), False),
    ],
    ids=["data", "FSDP2", "tensor", "pipeline"],
)
def test_experts_over_a_sequence_match_one_process(pool, sizes, sharded):
    assert_one_process(pool(4, trained, sizes, sharded, "sp"))


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    with running(f"ipc://{folder}/0") as first, running(f"ipc://{folder}/1") as second:
        yield first.address, second.address


@pytest.mark.composes(
    "PyTorch",
    "each trainer has its rows; multiply the loss by the number of trainers",
    case="FSDP2",
    data=4,
    FSDP=4,
    servers=2,
    equal="gradients",
)
@pytest.mark.composes(
    "PyTorch",
    "q, k and v are DTensors; each rank sends its heads to the servers",
    case="tensor",
    data=2,
    tensor=2,
    FSDP=2,
    servers=2,
    equal="gradients",
)
@pytest.mark.composes(
    "PyTorch",
    "each stage has a pool; sum gradients over data",
    case="pipeline",
    pipeline=2,
    data=2,
    servers=2,
    equal="gradients",
)
@pytest.mark.composes(
    "PyTorch",
    "trainers divide the experts; do not sum the experts' gradients",
    case="expert",
    data=4,
    expert=4,
    servers=2,
    equal="gradients",
)
@pytest.mark.parametrize(
    ("sizes", "sharded", "of_experts"),
    [
        ((1, 4, 1, 1), True, None),
        ((1, 2, 1, 2), True, None),
        ((2, 2, 1, 1), False, None),
        ((1, 4, 1, 1), False, "dp"),
    ],
    ids=["FSDP2", "tensor", "pipeline", "expert"],
)
def test_trainers_on_servers_match_one_process(pool, servers, sizes, sharded, of_experts):
    results = pool(4, trained, sizes, sharded, of_experts, servers)
    assert_one_process(results)
    assert all(tasks > 0 for _, tasks in results)
