"""torchtitan's own Llama with attention over ranks, on the real package: one process's numbers."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from seqpar import parity
from tests.support.ranks import virtual

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # torchtitan's own
OVERRIDE = "seqpar.integrations.torchtitan.sequence_parallel"
TOKENS, VOCABULARY = 64, 2048
ENDS = [[10, 40, 64], [64], [1, 64]]  # where the documents of each row end


def config():
    """torchtitan's model for debugging, with two layers."""
    from torchtitan.models.llama3 import model_registry

    made = model_registry("debugmodel").model
    made.layers = made.layers[:2]
    for layer in made.layers:
        rope = dataclasses.replace(layer.attention.rope, max_seq_len=TOKENS)
        layer.attention = dataclasses.replace(layer.attention, rope=rope)
    return made


def build(made):
    torch.manual_seed(0)
    model = made.build()
    model.init_states()
    return model


def batch():
    """(ids, labels, positions), each (rows, tokens)."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(VOCABULARY, (2, len(ENDS), TOKENS), generator=generator)
    rows = [
        torch.cat([torch.arange(b - a) for a, b in zip([0, *x], x, strict=False)]) for x in ENDS
    ]
    return ids, labels, torch.stack(rows)


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def one_process():
    """Logits and gradients of each document by itself."""
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.attention import ScaledDotProductAttention

    set_spmd_backend("spmd_types")
    made = config()
    for layer in made.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = build(made)
    ids, labels, positions = batch()
    rows = []
    for row, ends in enumerate(ENDS):
        parts = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        whole = [(ids[row, part][None], positions[row, part][None]) for part in parts]
        rows.append(torch.cat([model(x, positions=y) for x, y in whole], 1))
    logits = torch.cat(rows)
    loss_of(logits, labels).backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def local(x):
    return x.to_local() if hasattr(x, "to_local") else x


def on_rank(group, sizes, backend, dealt, options):
    """What differs most on a rank from one process, and what a fault said."""
    import spmd_types
    import torchtitan.distributed.parallel_dims as dims
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.distributed import full_dtensor
    from torchtitan.distributed.context_parallel import prepare_context_parallel_input
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types
    from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    expected, gradients = one_process()
    dims.device_type = "cpu"  # torchtitan takes a machine without GPUs for one with CUDA
    dp, cp, tp = sizes
    set_spmd_backend(backend)
    shape = {"dp_replicate": 1, "dp_shard": dp, "cp": cp, "tp": tp, "pp": 1, "ep": 1}
    parallel = dims.ParallelDims(**shape, world_size=4, spmd_backend=backend)
    made = config()
    set_llama3_sharding_config(made, enable_sp=True)
    apply_overrides(OverrideConfig(imports=[(OVERRIDE, options)]), made)
    model = build(made)
    model.parallelize(parallel)
    mesh = parallel.get_mesh("cp")
    ids, labels, positions = batch()
    columns = torch.arange(TOKENS).expand(ids.shape)
    (ids, labels, kwargs), (columns, _, _) = (
        prepare_context_parallel_input(
            x, labels, {"positions": positions}, mesh, torch.device("cpu"), dealt
        )
        for x in (ids, columns)
    )
    checked = backend == "spmd_types"
    with get_spmd_context(parallel_dims=parallel, spmd_typechecking=checked)():
        if backend == "full_dtensor":
            ids, labels, kwargs = full_dtensor.parallelize_inputs(parallel, ids, labels, kwargs)
        else:
            ids, labels, kwargs = annotate_input_spmd_types(parallel, ids, labels, kwargs)
        try:
            with torch.set_grad_enabled(tp == 1):
                logits = model(ids, **kwargs)
        except ValueError as fault:
            return str(fault)
        logits = local(logits)
        with spmd_types.no_typecheck():
            if tp == 1:
                loss_of(logits, local(labels)).backward()
    expected = expected.gather(1, columns[..., None].expand(*columns.shape, VOCABULARY))
    expected = expected.chunk(tp, -1)[parallel.get_mesh("tp").get_local_rank() if tp > 1 else 0]
    worst = float((logits.detach() - expected).abs().max())
    for name, p in model.named_parameters() if tp == 1 else ():
        gradient = local(p.grad)
        torch.distributed.all_reduce(gradient, group=mesh.get_group())
        scale = gradients[name].abs().max()
        worst = max(worst, float((gradient - gradients[name]).abs().max() / scale))
    return worst


def recorded_alone(folder):
    """torchtitan's own attention on one process, with one document in each row."""
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.attention import ScaledDotProductAttention

    set_spmd_backend("spmd_types")
    made = config()
    for layer in made.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = build(made)
    ids, labels, _ = batch()
    positions = torch.arange(TOKENS).repeat(len(ids), 1)
    with parity.record(folder, model):
        (loss_of(model(ids, positions=positions), labels) / labels.numel()).backward()


def recorded_on_rank(group, folder):
    """The same step on ranks, with seqpar's attention and torchtitan's order of tokens."""
    import spmd_types
    import torchtitan.distributed.parallel_dims as dims
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.distributed.context_parallel import prepare_context_parallel_input
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types
    from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    dims.device_type = "cpu"
    set_spmd_backend("spmd_types")
    shape = {"dp_replicate": 1, "dp_shard": 1, "cp": 4, "tp": 1, "pp": 1, "ep": 1}
    parallel = dims.ParallelDims(**shape, world_size=4, spmd_backend="spmd_types")
    made = config()
    set_llama3_sharding_config(made, enable_sp=True)
    apply_overrides(OverrideConfig(imports=[(OVERRIDE, {})]), made)
    model = build(made)
    model.parallelize(parallel)
    mesh = parallel.get_mesh("cp")
    ids, labels, _ = batch()
    count, ranks = labels.numel(), group.size()
    positions = torch.arange(TOKENS).repeat(len(ids), 1)
    ids, labels, kwargs = prepare_context_parallel_input(
        ids, labels, {"positions": positions}, mesh, torch.device("cpu"), "headtail"
    )
    with (
        parity.record(folder, model, mesh.get_group(), layout="head_tail"),
        get_spmd_context(parallel_dims=parallel, spmd_typechecking=True)(),
    ):
        ids, labels, kwargs = annotate_input_spmd_types(parallel, ids, labels, kwargs)
        logits = model(ids, **kwargs)
        with spmd_types.no_typecheck():
            (loss_of(local(logits), local(labels)) / count * ranks).backward()
            for x in model.parameters():
                torch.distributed.all_reduce(local(x.grad), group=mesh.get_group())
                local(x.grad).div_(ranks)


def test_a_recording_of_llama_agrees_with_one_process(pool, tmp_path):
    recorded_alone(tmp_path / "one")
    pool(4, recorded_on_rank, tmp_path / "four")
    report = parity.compare(tmp_path / "one", tmp_path / "four")
    assert report.first is None, str(report)
    assert {"output", "loss", "gradient of output", "gradient"} <= {
        x.stage for x in report.findings
    }


CASES = {  # on all processes of the pool, since meshes are made by all
    "ring": ((1, 4, 1), "spmd_types", "headtail", {}),
    "contiguous": ((1, 4, 1), "spmd_types", None, {"strategy": "ulysses", "load_balancer": None}),
    "beside DP": ((2, 2, 1), "spmd_types", "headtail", {}),
    "beside TP": ((1, 2, 2), "spmd_types", "headtail", {}),
    "DTensor": ((1, 4, 1), "full_dtensor", "headtail", {"strategy": "all_gather"}),
}


@pytest.mark.composes(
    "torchtitan",
    "torchtitan distributes rows and tokens, as without seqpar",
    case="beside DP",
    data=2,
    context=2,
    needs="torchtitan",
    equal="logits and gradients",
)
@pytest.mark.composes(
    "torchtitan",
    "torchtitan divides the heads. The test compares no gradients",
    case="beside TP",
    context=2,
    tensor=2,
    needs="torchtitan",
    equal="logits",
)
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", CASES)
def test_llama_has_the_logits_and_gradients_of_one_process(pool, kind):
    sizes, *options = CASES[kind]
    for worst in pool(4, on_rank, sizes, *options):
        assert worst < 1e-5, worst


@pytest.mark.exhaustive
@pytest.mark.parametrize(("told", "dealt"), [("headtail", None), (None, "headtail")])
def test_another_load_balancer_is_noticed(pool, told, dealt):
    for fault in pool(4, on_rank, (1, 4, 1), "spmd_types", dealt, {"load_balancer": told}):
        assert f"load_balancer must be that of torchtitan's config, got {told}" in fault


def test_one_rank_has_rows_of_any_length():
    from seqpar.integrations.torchtitan import _layout

    def boundaries(comm):
        return _layout(torch.arange(5).repeat(2, 1), comm, True).cu_seqlens.tolist()

    assert virtual(1, boundaries) == [[0, 5, 10]]


def test_chunks_of_half_a_token_are_refused():
    from seqpar.integrations.torchtitan import _layout

    def refused(comm):
        with pytest.raises(ValueError, match="seq_len must be a multiple of 4, two chunks"):
            _layout(torch.arange(5)[None], comm, True)

    virtual(2, refused)


def test_what_it_cannot_replace_is_refused():
    from torchtitan.models.common.attention import ScaledDotProductAttention, VarlenAttention

    from seqpar.integrations.torchtitan import sequence_parallel

    block = config().layers[0].attention
    with pytest.raises(ValueError, match="load_balancer must be 'headtail' or None, got 'ptrr'"):
        sequence_parallel(block, load_balancer="ptrr")
    other = dataclasses.replace(block, inner_attention=ScaledDotProductAttention.Config())
    with pytest.raises(ValueError, match="inner_attention must be flex or varlen attention"):
        sequence_parallel(other)
    window = VarlenAttention.Config(window_size=(-1, -1))
    with pytest.raises(ValueError, match="window_size must end at the query"):
        sequence_parallel(dataclasses.replace(block, inner_attention=window))
    window = VarlenAttention.Config(window_size=(7, 0))
    made = sequence_parallel(dataclasses.replace(block, inner_attention=window), strategy="ring")
    assert made.inner_attention.left == 7 and made.n_heads == block.n_heads
    with pytest.raises(ValueError, match="attention_masks must be None"):
        made.build()(None, attention_masks=1)
    with pytest.raises(ValueError, match="spmd_backend must be spmd_types or full_dtensor"):
        made.build()(None, None, torch.arange(4)[None])


def test_documents_follow_positions_written_in_place():
    from seqpar.integrations.torchtitan import InnerAttention

    def run(comm):
        module = InnerAttention.Config().build()
        module.attention, module.comm = object(), comm
        positions = torch.arange(8)[None].clone()
        first = module.layout_of(positions)
        assert module.layout_of(positions) is first and first.documents == 1
        positions[0, 3:] -= 3
        assert module.layout_of(positions).cu_seqlens.tolist() == [0, 3, 8]

    virtual(1, run)
