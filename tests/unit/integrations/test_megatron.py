"""seqpar's core attention for Megatron-Core against softmax, without Megatron-Core."""

import dataclasses
import enum
import importlib
import importlib.util
import inspect
import types

import numpy as np
import pytest
import torch

from seqpar.comm.messages.comm import Comm
from seqpar.integrations import megatron
from tests.support import megatron_contract as contract
from tests.support.megatron_contract import (
    AttnMaskType,
    CrossAttentionSubmodules,
    DotProductAttention,
    ModuleSpec,
    PackedSeqParams,
    SelfAttentionSubmodules,
)
from tests.support.ranks import virtual

HEADS, GROUPS, DIM = 4, 2, 8


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    contract.install(monkeypatch)


def config(**changed):
    fields = {"attention_dropout": 0.0, "params_dtype": torch.float64, "init_method": ones}
    return types.SimpleNamespace(**contract.CONFIG | fields | changed)


def ones(x):
    return x.data.fill_(1.0)


def spec_of(core=DotProductAttention):
    attention = SelfAttentionSubmodules("qkv", core, "proj")
    return ModuleSpec("layer", submodules=[ModuleSpec("attention", {"a": 1}, attention)])


def core_attention(
    comm, strategy=None, kind=AttnMaskType.causal, layer=1, options=None, made=None, **changed
):
    """The module that Megatron builds from a replaced spec."""
    spec = megatron.sequence_parallel(spec_of(), strategy, **options or {})
    arguments = {"attention_type": "self", "cp_comm_type": None, "softmax_scale": None}
    return spec.submodules[0].submodules.core_attention(
        config=config(**changed),
        layer_number=layer,
        attn_mask_type=kind,
        pg_collection=types.SimpleNamespace(cp=comm, tp=None),
        **arguments | (made or {}),
    )


ONE = Comm("megatron", 0, 1)


def attention(q, k, v, documents, *, causal=True, window=-1, sinks=None, real=None):
    """Softmax over a packed batch: (T, H, D), the document of each token, and which are real."""
    k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
    places = torch.arange(len(q))
    allowed = documents[:, None] == documents
    if real is not None:
        allowed = allowed & (real[:, None] == real)
    if causal:
        allowed = allowed & (places[:, None] >= places)
    if window >= 0:
        allowed = allowed & (places[:, None] - places <= window)
    scores = scores.masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(HEADS, len(q), 1)], -1)
    weights = scores.softmax(-1)[..., : len(q)]
    return torch.einsum("hqk,khd->qhd", weights, v)


def dealt(ends, ranks, rank):
    """Megatron's indices of a rank's tokens, if it deals each sequence."""
    index = []
    for start, stop in zip([0, *ends], ends, strict=False):
        chunks = torch.arange(start, stop).chunk(2 * ranks)
        index += [chunks[rank], chunks[-1 - rank]]
    return torch.cat(index)


def operands(tokens, rows=1):
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows * tokens, h, DIM) for h in (HEADS, GROUPS, GROUPS)]
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return made, torch.randn(shapes[0], generator=generator, dtype=torch.float64)


def cu(*ends):
    return torch.tensor([0, *ends], dtype=torch.int32)


def packed_of(ends, form="thd", padded=None, **others):
    given = {"cu_seqlens_q": cu(*ends), "cu_seqlens_kv": cu(*ends)}
    if padded is not None:
        given |= {"cu_seqlens_q_padded": cu(*padded), "cu_seqlens_kv_padded": cu(*padded)}
    return PackedSeqParams(qkv_format=form, **given, **others)


def documents_of(ends):
    lengths = torch.tensor([0, *ends]).diff()
    return torch.repeat_interleave(torch.arange(len(ends)), lengths)


# name: (rows, tokens of a row, packed sequences, sequences that are dealt, documents, options)
ROWS = [32, 64]
BATCHES = {
    "rows": (2, 32, None, ROWS, ROWS, {}),
    "documents": (1, 48, packed_of([8, 32, 48]), [8, 32, 48], [8, 32, 48], {}),
    "of rows": (2, 32, packed_of([5, 32, 33, 64], "sbhd"), ROWS, [5, 32, 33, 64], {}),
    "as one": (
        1, 48, packed_of([7, 30, 48]), [48], [7, 30, 48], {"per_sequence_balancing": True},
    ),
    "padded": (
        1, 48, packed_of([5, 20, 36], padded=[8, 24, 48]), [8, 24, 48], [8, 24, 48], {},
    ),
}  # fmt: skip
MASKS = {
    "causal": (AttnMaskType.causal, {}, {}),
    "whole": (AttnMaskType.no_mask, {}, {"causal": False}),
    "window": (AttnMaskType.padding_causal, {"window_size": (4, 0)}, {"window": 4}),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("batch", BATCHES)
def test_out_and_gradients_are_those_of_softmax(batch, mask):
    rows, tokens, packed, sequences, ends, options = BATCHES[batch]
    kind, changed, expected = MASKS[mask]
    if packed is None and kind is AttnMaskType.padding_causal:
        kind = AttnMaskType.causal
    (q, k, v), grad = operands(tokens, rows)
    real = None
    if batch == "padded":
        lengths, places = np.diff([0, 5, 20, 36]), torch.arange(48)
        starts = torch.tensor([0, 8, 24])[documents_of(ends)]
        real = places - starts < torch.tensor(lengths)[documents_of(ends)]
        grad[~real] = 0  # the loss leaves padding out
    for x in (q, k, v):
        x.requires_grad_()
    out = attention(q, k, v, documents_of(ends), real=real, **expected)
    wanted = torch.autograd.grad(out, (q, k, v), grad)
    thd = packed is not None and packed.qkv_format == "thd"

    def on_rank(comm):
        core = core_attention(comm, "ring", kind, options=options, **changed)
        index = dealt(sequences, comm.size, comm.rank)
        parts = [x.detach()[index].requires_grad_() for x in (q, k, v)]
        given = [x if thd else x.unflatten(0, (rows, -1)).transpose(0, 1) for x in parts]
        copied = None if packed is None else dataclasses.replace(packed)
        found = core(*given, None, packed_seq_params=copied)
        local = grad[index].flatten(1)
        if not thd:
            local = local.unflatten(0, (rows, -1)).transpose(0, 1)
        assert found.shape == local.shape
        found.backward(local)
        if not thd:
            found = found.transpose(0, 1).flatten(0, 1)
        return index, [found.detach(), *(x.grad for x in parts)]

    for index, results in virtual(2, on_rank):
        keep = slice(None) if real is None else real[index]
        for x, whole in zip(results, (out.flatten(1), *wanted), strict=True):
            torch.testing.assert_close(x[keep], whole.detach()[index][keep], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["off-by-one", "learnable"])
def test_sinks_join_the_denominator(kind):
    (q, k, v), _ = operands(16)
    core = core_attention(ONE, "ring", softmax_type=kind)
    sinks = torch.full((HEADS,), 1.0 if kind == "learnable" else 0.0, dtype=torch.float64)
    found = core(q[:, None], k[:, None], v[:, None], None)[:, 0]
    expected = attention(q, k, v, documents_of([16]), sinks=sinks).flatten(1)
    torch.testing.assert_close(found, expected)
    learned = ["softmax_offset"] if kind == "learnable" else []
    assert [name for name, _ in core.named_parameters()] == list(core.state_dict()) == learned
    core.pg_collection.tp = None
    sharded = core.sharded_state_dict("a.", metadata={"dp_cp_group": None})
    assert list(sharded) == [f"a.{name}" for name in learned]


def test_windows_skip_the_layers_of_the_config():
    windows = {"window_size": (3, 0), "window_attn_skip_freq": 2}
    assert [core_attention(ONE, layer=n, **windows).window_size for n in (1, 2)] == [
        (3, 0),
        (-1, -1),
    ]


def test_largest_logits_are_those_of_all_ranks():
    (q, k, v), _ = operands(16)

    def on_rank(comm):
        core = core_attention(comm, "ring", qk_clip=True)
        index = dealt([16], comm.size, comm.rank)
        for scale in (1.0, 0.5):
            core(*(scale * x[index][:, None] for x in (q, k)), v[index][:, None], None)
        return core.current_max_attn_logits

    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) / DIM**0.5
    scores = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf)
    for found in virtual(2, on_rank):
        torch.testing.assert_close(found, scores.amax((1, 2)))


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [(None, "ring"), ("p2p", "ring"), ("all_gather", "all_gather"), ("a2a", "ulysses")],
)
def test_the_communication_type_chooses_the_strategy(kind, strategy):
    assert core_attention(ONE, made={"cp_comm_type": kind}).strategy == strategy


def test_hierarchical_groups_are_the_mesh_of_usp():
    def on_rank(comm):
        sizes = {"hierarchical_context_parallel_sizes": [2, 1]}
        core = core_attention(comm, made={"cp_comm_type": "a2a+p2p"}, **sizes)
        return core.strategy, core.group.shape

    assert virtual(2, on_rank) == [("usp", (1, 2))] * 2


def test_a_batch_may_have_its_own_ranks():
    (q, k, v), _ = operands(16)
    expected = attention(q, k, v, documents_of([16])).flatten(1)

    def on_rank(comm):
        core = core_attention(comm, "ring")
        alone = packed_of([16], local_cp_size=torch.tensor(1))
        index = dealt([16], comm.size, comm.rank)
        shared = packed_of([16], local_cp_size=2, cp_group=comm)
        parts = (x[index] for x in (q, k, v))
        return core(q, k, v, None, packed_seq_params=alone), core(
            *parts, None, packed_seq_params=shared
        )

    for rank, (alone, shared) in enumerate(virtual(2, on_rank)):
        torch.testing.assert_close(alone, expected)
        torch.testing.assert_close(shared, expected[dealt([16], 2, rank)])


def test_documents_are_read_once_and_again_after_a_change():
    from seqpar.integrations.megatron.dealt_tokens import layout_of_packed

    packed = packed_of([4, 16])
    first = layout_of_packed(packed, (1, 16), 1, False)
    assert layout_of_packed(packed, (1, 16), 1, False) is first
    packed.cu_seqlens_q[1] = packed.cu_seqlens_kv[1] = 8
    assert layout_of_packed(packed, (1, 16), 1, False).cu_seqlens.tolist() == [0, 8, 16]


def test_documents_are_read_again_after_tensors_are_replaced():
    from seqpar.integrations.megatron.dealt_tokens import layout_of_packed

    packed = packed_of([16])
    for end in range(1, 16):
        packed.cu_seqlens_q = packed.cu_seqlens_kv = None  # the next tensor may have the same id
        packed.cu_seqlens_q = packed.cu_seqlens_kv = cu(end, 16)
        found = layout_of_packed(packed, (1, 16), 1, False)
        assert found.cu_seqlens.tolist() == [0, end, 16]


def test_sinks_that_are_not_learned_move_with_the_model():
    core = core_attention(ONE, softmax_type="off-by-one").to("meta")
    assert core.softmax_offset.device.type == "meta"


def test_labels_of_more_tokens_need_documents_that_are_dealt_one_by_one():
    def on_rank(comm):
        q, k, v = (x[dealt([16], 2, comm.rank)] for x in operands(16)[0])
        rows = [x[:, None] for x in (q, k, v)]
        core = core_attention(comm, "ring", mtp_num_layers=1)
        core(q, k, v, None, packed_seq_params=packed_of([16]))
        with pytest.raises(ValueError, match="mtp_num_layers must be None with documents in rows"):
            core(*rows, None, packed_seq_params=packed_of([9, 16], "sbhd"))
        balanced = {"per_sequence_balancing": True}
        core = core_attention(comm, "ring", options=balanced, mtp_num_layers=1)
        with pytest.raises(ValueError, match="mtp_num_layers must be None with documents in rows"):
            core(q, k, v, None, packed_seq_params=packed_of([9, 16]))

    virtual(2, on_rank)


SET_UP = {
    "attention_dropout must be 0, got 0.1": {"attention_dropout": 0.1},
    "attention_dropout must be 0, got 0.2": {"made": {"attention_dropout": 0.2}},
    "fp8_dot_product_attention must be False": {"fp8_dot_product_attention": True},
    "fp8_multi_head_attention must be False": {"fp8_multi_head_attention": True},
    "batch_invariant_mode must be False": {"batch_invariant_mode": True},
    "cuda_graph_impl must be 'none'": {"cuda_graph_impl": "local"},
    "experimental_attention_variant must be None or": {"experimental_attention_variant": "dsa"},
    "attention_type must be 'self', got 'cross'": {"made": {"attention_type": "cross"}},
    "attn_mask_type must be one of .*'arbitrary'": {"kind": AttnMaskType.arbitrary},
    "cp_comm_type must be one of .*got 'b2b'": {"made": {"cp_comm_type": "b2b"}},
    "window_size must end at the query, .*, got \\(3, 2\\)": {"window_size": (3, 2)},
    "softmax_type must be 'vanilla' or .*got 'other'": {"softmax_type": "other"},
    "hierarchical_context_parallel_sizes must be two sizes": {
        "strategy": "usp",
        "hierarchical_context_parallel_sizes": [2, 2],
    },
}


@pytest.mark.composes(
    "Megatron-Core",
    "two sizes whose product is the number of ranks of context",
    context=4,
    refused="hierarchical_context_parallel_sizes",
)
@pytest.mark.parametrize("error", SET_UP)
def test_what_is_not_exact_is_refused_when_the_model_is_built(error):
    with pytest.raises(ValueError, match=error):
        core_attention(ONE, **SET_UP[error])


def test_wrong_options_are_refused_when_the_model_is_built():
    with pytest.raises(TypeError, match="head_groups"):
        core_attention(ONE, "ring", options={"head_groups": 2})


CALLS = {
    "attention_mask must be None, got \\(1, 1, 16, 16\\): documents": {
        "attention_mask": torch.zeros(1, 1, 16, 16)
    },
    "attention_bias must be None": {"attention_bias": torch.zeros(1)},
    "packed_seq_params must be given with attn_mask_type padding": {
        "attn_mask_type": AttnMaskType.padding
    },
    "attn_mask_type must be one of": {"attn_mask_type": AttnMaskType.causal_bottom_right},
    "qkv_format must be 'thd' or 'sbhd', got 'bshd'": {"packed": packed_of([16], "bshd")},
    "cu_seqlens_q must be given, got None": {"packed": PackedSeqParams("sbhd")},
    "cu_seqlens_q must end at 16 tokens, 16 on each of 1 ranks, got 12": {
        "packed": packed_of([12])
    },
    "cu_seqlens_q must have an entry at the start of each row of 8": {
        "packed": packed_of([4, 16], "sbhd"),
        "rows": 2,
    },
    "cu_seqlens_kv must be equal to cu_seqlens_q": {
        "packed": dataclasses.replace(packed_of([16]), cu_seqlens_kv=cu(8, 16))
    },
    "cu_seqlens_q_padded must have room for each document": {
        "packed": packed_of([12, 16], padded=[8, 16])
    },
    "cp_group must be given for 2 ranks": {"packed": packed_of([16], local_cp_size=2)},
}


@pytest.mark.parametrize("error", CALLS)
def test_what_is_not_exact_is_refused_in_the_call(error):
    given = dict(CALLS[error])
    packed, rows = given.pop("packed", None), given.pop("rows", 1)
    q, k, v = operands(16)[0]
    if packed is None or packed.qkv_format != "thd":
        q, k, v = (x.unflatten(0, (rows, -1)).transpose(0, 1) for x in (q, k, v))
    call = {"attention_mask": None, "packed_seq_params": packed} | given
    with pytest.raises(ValueError, match=error):
        core_attention(ONE)(q, k, v, **call)


def test_keys_of_other_tokens_are_refused():
    q, k, v = (x[:, None] for x in operands(16)[0])
    with pytest.raises(ValueError, match=r"key must have the 4 tokens of query, .* got 16"):
        core_attention(ONE)(q[:4], k, v, None)


def test_uneven_chunks_are_refused():
    def on_rank(comm):
        core = core_attention(comm, "ring")
        x = torch.zeros(5, HEADS, DIM)
        with pytest.raises(ValueError, match=r"seq_length must be a multiple of 4, .*got 10"):
            core(*[x[:, None]] * 3, None)
        expected = (
            "cu_seqlens_q must have documents of a multiple of 4 tokens.*6 tokens in document 0"
        )
        with pytest.raises(ValueError, match=f"{expected}: pad the documents, or pass qkv_format"):
            core(x, x, x, None, packed_seq_params=packed_of([6, 10]))

    virtual(2, on_rank)


def test_the_spec_is_copied_and_only_core_attention_differs():
    spec = spec_of()
    made = megatron.sequence_parallel([spec], "ring")[0]
    assert spec == spec_of()
    core = made.submodules[0].submodules.core_attention
    assert core.module.__name__ == "CoreAttention"
    made.submodules[0].submodules.core_attention = DotProductAttention
    assert made == spec


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        (ModuleSpec("layer"), "spec must have a core attention"),
        (spec_of(AttnMaskType), "core_attention must be one of .*got AttnMaskType"),
        (spec_of(ModuleSpec(("a.b", "Other"))), "core_attention must be one of .*got Other"),
        (
            ModuleSpec("layer", submodules=CrossAttentionSubmodules("q", "kv", "core", "proj")),
            "spec must have self attention only, got CrossAttentionSubmodules",
        ),
    ],
)
def test_specs_that_cannot_be_replaced_are_refused(spec, error):
    with pytest.raises(ValueError, match=error):
        megatron.sequence_parallel(spec)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"strategy must be one of .*got 'rings'"):
        megatron.sequence_parallel(spec_of(), "rings")
    with pytest.raises(ValueError, match="per_sequence_balancing must be"):
        megatron.sequence_parallel(spec_of(), per_sequence_balancing="no")


def is_group(ranks, world):
    """Whether Megatron's hybrid context parallelism has a process group of these ranks."""
    size = len(ranks)
    aligned = ranks == list(range(ranks[0], ranks[0] + size)) and ranks[0] % size == 0
    return size == world or (aligned and size & (size - 1) == 0 and 2 * size <= world)


@pytest.mark.parametrize("world", [1, 4, 6, 8])
@pytest.mark.parametrize("samples", [1, 3, 40])
def test_a_scheduler_gives_megatron_what_it_can_run(world, samples):
    rng = np.random.default_rng(samples)
    capacity = 2048
    lengths = rng.integers(1, capacity * world // (2 * world), samples) * 2 * world
    given = [(100 + i, int(n)) for i, n in enumerate(lengths)]
    cluster = f"1x{world}-h100"
    scheduler = megatron.PlanScheduler(
        capacity, types.SimpleNamespace(size=lambda: world), cluster=cluster, model="llama-8b"
    )
    groups, ids = scheduler.get_groups_and_subsamples(given, None)
    (tokens,), (of_ranks,) = groups, ids
    assert all(of_ranks), "Megatron's last group must have a sample on each rank"
    found, order = {}, {}
    for rank, own in enumerate(of_ranks):
        assert [dict(given)[x] for x in own] == tokens[rank]
        assert len(set(own)) == len(own)
        for sample in own:
            found.setdefault(sample, []).append(rank)
            order.setdefault(sample, set())
        for i, sample in enumerate(own):
            order[sample] |= set(own[i + 1 :])
    assert set(found) == {sample for sample, _ in given}
    for sample, ranks in found.items():
        assert is_group(ranks, world)
        assert dict(given)[sample] <= capacity * len(ranks)
        assert all(sample not in order[later] for later in order[sample]), "ranks would wait"


def test_a_scheduler_refuses_what_megatron_cannot_cut():
    group = types.SimpleNamespace(size=lambda: 4)
    scheduler = megatron.PlanScheduler(64, group, cluster="1x4-h100", model="llama-8b")
    with pytest.raises(ValueError, match="sample_id_seqlens must have a sample, got none"):
        scheduler.get_groups_and_subsamples([])
    with pytest.raises(ValueError, match="must have multiples of 8 tokens, got 12 of sample 7"):
        scheduler.get_groups_and_subsamples([(7, 12)])
    with pytest.raises(ValueError, match="cluster must have the 4 ranks of dp_cp_group, got 8"):
        megatron.PlanScheduler(64, group, cluster="1x8-h100", model="llama-8b")


@pytest.mark.filterwarnings("ignore")  # Megatron's own
def test_the_stand_in_has_the_signatures_of_megatron(monkeypatch):
    monkeypatch.undo()
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    from megatron.core.transformer.transformer_config import TransformerConfig

    for place, things in contract.PLACES.items():
        module = importlib.import_module(f"megatron.core.{place}")
        for thing in things:
            real = getattr(module, thing.__name__)
            if isinstance(thing, enum.EnumType):
                assert {x.name: x.value for x in thing} == {x.name: x.value for x in real}
            elif dataclasses.is_dataclass(thing):
                assert defaults(thing) == defaults(real), thing
            elif inspect.isclass(thing):
                for name in vars(thing).keys() & {
                    "__init__",
                    "forward",
                    "get_groups_and_subsamples",
                }:
                    assert arguments(getattr(thing, name)) == arguments(getattr(real, name)), thing
            else:
                assert arguments(thing) == arguments(real), thing
    fields = {x.name: x.default for x in dataclasses.fields(TransformerConfig)}
    for name, default in contract.CONFIG.items():
        assert name in fields
        if name not in ("num_attention_heads", "params_dtype"):
            assert fields[name] == default, name


def defaults(kind):
    return [(x.name, x.default is dataclasses.MISSING, x.init) for x in dataclasses.fields(kind)]


def arguments(function):
    return [(x.name, x.default, x.kind) for x in inspect.signature(function).parameters.values()]
