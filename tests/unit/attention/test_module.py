"""What the modules of both kinds of attention share: faults on all ranks, and meta tensors."""

import copy
import re
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed.nn  # before there is a group, which its default arguments would hold

from seqpar import LASP2Attention, Layout, ShardedCache, make_attention
from seqpar.comm.binding import BoundStrategy
from seqpar.comm.messages.comm import Comm
from tests.support.cases import module
from tests.support.compiling import compiling_elsewhere
from tests.support.fakes import fake_group
from tests.support.ranks import virtual

RANKS, BAD = 3, 1  # how many ranks there are, and the one that is called wrongly
LAYOUT = Layout.zigzag([0, 10, 24], RANKS)
TOKENS = LAYOUT.tokens_per_rank[BAD]
META = torch.zeros(TOKENS, 2, 8, device="meta")
with warnings.catch_warnings(action="ignore"):  # torch may change the one and drop the other
    NESTED = torch.nested.nested_tensor([torch.zeros(2, 8)])
    QUANTIZED = torch.quantize_per_tensor(torch.zeros(TOKENS, 1, 8), 0.1, 0, torch.qint8)

COMMON = {  # of both kinds: changes of a call, and what the error of all ranks must say
    "no tensor": ({"q": None}, "q must be a tensor, got NoneType"),
    "a list": ({"v": [1.0]}, "v must be a tensor, got list"),
    "sparse": ({"k": torch.eye(8).to_sparse()}, "k must be a dense tensor"),
    "nested": ({"q": NESTED}, "q must be a dense tensor, got a nested one"),
    "quantized": ({"v": QUANTIZED}, "v must be a dense tensor, got a quantized one"),
    "q 2-D": ({"q": torch.zeros(TOKENS, 8)}, "q must be \\(T, H, D\\)"),
    "k 4-D": ({"k": torch.zeros(1, TOKENS, 1, 8)}, "k must be \\(T, H, D\\) like q"),
    "no heads": ({"q": torch.zeros(TOKENS, 0, 8)}, "q must have at least one head"),
    "no head dim": ({"q": torch.zeros(TOKENS, 2, 0)}, "q must have at least one head"),
    "another device": ({"k": META}, "k must be on q's device, cpu, got meta"),
    "q on another device": ({"q": META}, "k must be on q's device, meta, got cpu"),
    "another dtype": ({"q": torch.zeros(TOKENS, 2, 8).int()}, "q must be of one of the dtypes"),
    "no layout": ({"layout": None}, "layout must be a seqpar.Layout, got NoneType"),
    "ranks": ({"layout": Layout.zigzag(36, 2)}, "layout must be for the group's 3 ranks"),
    "causal": ({"causal": None}, "causal must be True or False, got None"),
}
SOFTMAX = COMMON | {
    "kv_layout": ({"kv_layout": 5}, "kv_layout must be a seqpar.Layout, got int"),
    "documents": ({"kv_layout": Layout.zigzag(24, RANKS)}, "kv_layout must have layout's 2"),
    "window": ({"window_size": 5}, "window_size must be two integers"),
    "dropout": ({"dropout_p": 0.5}, "dropout_p must be 0, got 0.5"),
    "dropout's type": ({"dropout_p": "x"}, "dropout_p must be a number, got 'x'"),
    "prefix": ({"prefix_lens": [[1], [1, 2]]}, "prefix_lens must be a 1-D sequence"),
    "scale": ({"softmax_scale": "x"}, "softmax_scale must be a number, got 'x'"),
    "softcap": ({"softcap": [2.0]}, "softcap must be a number"),
    "sinks": ({"sinks": [1.0, 2.0]}, "sinks must be a tensor, got list"),
    "return_lse": ({"return_lse": 1}, "return_lse must be True or False, got 1"),
}
LINEAR = COMMON | {
    "decay": ({"log_decay": -0.5}, "log_decay must be a tensor, got float"),
    "decay's device": ({"log_decay": META}, "log_decay must be on q's device, cpu"),
    "decay's gradient": ({"log_decay": torch.zeros(1, requires_grad=True)}, "log_decay must not"),
    "scale": ({"scale": None}, "scale must be a number, got None"),
    "state": ({"initial_state": 0.0}, "initial_state must be a tensor, got float"),
    "state's shape": ({"initial_state": torch.zeros(2)}, "initial_state must be \\(documents"),
    "state's device": ({"initial_state": META}, "initial_state must be on q's device, cpu"),
    "return_state": ({"return_state": "no"}, "return_state must be True or False, got 'no'"),
}
KINDS = {"softmax": SOFTMAX, "linear": LINEAR}


def make(kind, comm, **options):
    return LASP2Attention(comm, **options) if kind == "linear" else module("ring", comm, **options)


def right_call(tokens, device="cpu"):
    q, k = (torch.zeros(tokens, heads, 8, device=device) for heads in (2, 1))
    return {"q": q, "k": k, "v": k, "layout": LAYOUT, "causal": True}


def faulty_calls(comm, kind):
    """Make each wrong call on one rank and a right one on the others; return all errors."""
    attn, errors = make(kind, comm, check_ranks=True), []
    right = right_call(LAYOUT.tokens_per_rank[comm.rank])
    for change, _ in KINDS[kind].values():
        with pytest.raises(ValueError, match="must") as error:
            attn(**right | (change if comm.rank == BAD else {}))
        errors.append(str(error.value))
    attn(**right)  # the group still works
    return errors


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_on_one_rank_is_raised_everywhere(kind):
    for errors, (name, (_, message)) in zip(
        zip(*virtual(RANKS, faulty_calls, kind), strict=True), KINDS[kind].items(), strict=True
    ):
        assert len(set(errors)) == 1, name
        assert re.search(f"{message}.* \\(rank {BAD} of {RANKS}\\)$", errors[0]), (name, errors)


@pytest.mark.parametrize("kind", KINDS)
def test_errors_reach_all_ranks_while_another_thread_compiles(kind):
    with compiling_elsewhere():
        test_a_type_error_on_one_rank_stays_one(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_type_error_on_one_rank_stays_one(kind):
    """Such as DTensor or a tensor subclass of others may raise."""

    def call(comm):
        attn = make(kind, comm, check_ranks=True)
        if comm.rank == BAD:
            attn._operator_inputs = lambda *_, **__: len(3)
        with pytest.raises(TypeError, match=f"has no len.*\\(rank {BAD} of {RANKS}\\)"):
            attn(**right_call(LAYOUT.tokens_per_rank[comm.rank]))

    virtual(RANKS, call)


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_arguments_on_one_rank_are_raised_everywhere(kind):
    def call(comm):
        attn = make(kind, comm, check_ranks=True)
        right = right_call(LAYOUT.tokens_per_rank[comm.rank])
        for wrong, message in (
            ({name: x for name, x in right.items() if name != "layout"}, "argument: 'layout'"),
            (
                right | {"windowsize": 3},
                "^windowsize is not an argument of a call, got .*",
            ),
        ):
            with pytest.raises(TypeError, match=f"{message} \\(rank {BAD} of {RANKS}\\)"):
                attn(**wrong if comm.rank == BAD else right)

    virtual(RANKS, call)


@pytest.mark.parametrize("kind", KINDS)
def test_unsupported_answers_and_sends_nothing(kind):
    comm = Comm("silent", BAD, RANKS)
    attn = make(kind, comm, check_ranks=True)
    right = right_call(TOKENS)
    for change, message in KINDS[kind].values():
        assert re.search(message, attn.unsupported(**right | change))
        with pytest.raises(ValueError, match=message):
            attn.traffic(**right | change)
    assert "windowsize is not an argument of a call" in attn.unsupported(**right, windowsize=3)
    assert attn.unsupported(**right) is None and comm.sent_messages == 0


OTHER_NAMES = {
    "softmax": {
        "is_causal": "pass causal;",
        "attn_mask": r"documents and padding need no mask.* pass mask=seqpar.Mask.of_ranges",
        "attention_mask": r"documents and padding need no mask.* pass mask=seqpar.Mask.of_ranges",
        "scale": "pass softmax_scale;",
        "dropout": "pass dropout_p;",
        "enable_gqa": "leave it out: k and v may always have fewer heads than q;",
        "cu_seqlens": "leave it out: the layout has the documents, as in Layout.zigzag",
        "max_seqlen_q": "leave it out: the layout has the documents",
        "position_ids": "leave it out: the layout has the positions",
        "sliding_window": r"pass window_size: a sliding window of w keys.* is \(w - 1, 0\);",
        "return_attn_probs": "pass return_lse;",
        "s_aux": "pass sinks;",
        "query": "pass q;",
        "past_key_values": "decode with seqpar.ShardedCache;",
        "group": "leave it out: the module was made with its group",
    },
    "linear": {
        "is_causal": "pass causal;",
        "attention_mask": "documents and padding need no mask, since the layout has the documents;",
        "softmax_scale": "pass scale;",
        "g": "pass log_decay;",
        "output_final_state": "pass return_state;",
        "cu_seqlens": "leave it out: the layout has the documents",
    },
}


@pytest.mark.parametrize("kind", OTHER_NAMES)
def test_arguments_of_other_libraries_are_named_with_ours(kind):
    comm = Comm("silent", BAD, RANKS)
    attn = make(kind, comm)
    for name, way_out in OTHER_NAMES[kind].items():
        message = f"^{name} is not an argument of a call, got {name}=5: {way_out}"
        with pytest.raises(TypeError, match=message):
            attn(**right_call(TOKENS), **{name: 5})
        assert re.search(message, attn.unsupported(**right_call(TOKENS), **{name: 5}))
    assert comm.sent_messages == 0


def test_decode_and_caches_name_our_arguments():
    attn = module("ring", Comm("silent", 0, 1))
    cache = ShardedCache(attn, Layout.zigzag(4, 1))
    x = torch.zeros(5, 2, 8)
    cache.put(0, x[1:], x[1:])
    cache.extend()
    message = "^is_causal is not an argument of a call, got is_causal=True: pass causal;"
    with torch.no_grad():
        with pytest.raises(TypeError, match=message):
            attn.decode(x[:1], x, x, Layout.zigzag(5, 1), is_causal=True)
        with pytest.raises(TypeError, match=message):
            cache.attend(0, x[:1], x[:1], x[:1], is_causal=True)
    with pytest.raises(TypeError, match=message):
        attn.preparation(heads=2, head_dim=8, dtype=torch.float32, is_causal=True)


@pytest.mark.parametrize("name", ["ring", "usp", "mesh", "disaggregated"])
def test_arguments_of_calls_are_no_options(name):
    comm = MESH if name in ("mesh", "usp") else Comm("silent", 0, 4)
    for option, way_out in (
        ("causal", "causal is an argument of a call"),
        ("is_causal", "in a call, pass causal"),
        ("attn_mask", "in a call, documents and padding need no mask"),
    ):
        with pytest.raises(TypeError, match=f"^{option} is not an option of .*; {way_out}"):
            make_attention(name, comm, **{option: True})


@pytest.mark.parametrize("method", ["traffic", "mask_area"])
def test_questions_take_the_arguments_of_calls(method):
    attn = module("ring", Comm("silent", BAD, RANKS))
    call = right_call(TOKENS) | {"sinks": torch.zeros(2), "return_lse": np.bool_(True)}
    assert len(getattr(attn, method)(**call))
    for wrong in ("windowsize", "deterministic", "strategy", "merged"):
        with pytest.raises(TypeError, match=f"^{wrong} is not an argument .* q, k, v, layout, cau"):
            getattr(attn, method)(**call, **{wrong: 3})
    del call["causal"]
    with pytest.raises(TypeError, match="causal"):
        getattr(attn, method)(**call)


@pytest.mark.parametrize(
    "name", ["ring", "ulysses", "all_gather", "token_ring", "mesh", "usp", "linear"]
)
def test_meta_tensors_give_shapes_and_send_nothing(name):
    comm = Comm("silent", 0, 4)
    layout = Layout.zigzag([0, 10, 24], 4)
    tokens, options = layout.tokens_per_rank[0], {"check_ranks": True}
    attn = LASP2Attention(comm, **options) if name == "linear" else module(name, comm, **options)
    returned = {"return_state" if name == "linear" else "return_lse": True}
    shapes = (2, tokens, 4, 8), (2, tokens, 2, 8), (2, tokens, 2, 6)
    q, k, v = (torch.zeros(shape, device="meta", requires_grad=True) for shape in shapes)
    out, other = attn(q, k, v, layout, causal=True, **returned)
    expected = (2, 2, 2, 8, 6) if name == "linear" else (2, tokens, 4)
    assert out.is_meta and out.shape == (2, tokens, 4, 6) and other.shape == expected
    (out.sum() + other.sum()).backward()
    assert [x.grad.shape for x in (q, k, v)] == [x.shape for x in (q, k, v)]
    with pytest.raises(ValueError, match=r"^k must have q's head dim, 4, got 8 .rank 0 of 4.$"):
        attn(q[..., :4], k, v, layout, causal=True)
    with pytest.raises(ValueError, match=r"^causal must be True or False, got 3 .rank 0 of 4.$"):
        attn(q, k, v, layout, causal=3)
    assert comm.sent_messages == 0


MESH = copy.copy(Comm("mesh", 0, 4))
MESH.shape = (2, 2)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("ulysses", {"inner": 3}, TypeError, "inner is not an option of 'ulysses', which has head"),
        ("ulysses", {"outer": "ring"}, TypeError, "outer is not an option of 'ulysses'"),
        ("ring", {"stripe": 1}, TypeError, "stripe .* of 'ring', which has message_dtype"),
        (
            "usp",
            {"inner": 2},
            TypeError,
            "inner is not an option of 'ring', which has message_dtype",
        ),
        ("usp", {"outer": ["ring"]}, ValueError, "outer must be one of .* got \\['ring'\\]"),
        ("usp", {"head_groups": True}, ValueError, "head_groups must be an integer, got True"),
        ("ulysses", {"head_groups": 2.0}, ValueError, "head_groups must be an integer, got 2.0"),
        ("ulysses", {"keep": "all"}, ValueError, 'keep must be "heads" or "tokens", got \'all\''),
        ("usp", {"keep": ["heads"]}, ValueError, 'keep must be "heads" or "tokens", got'),
        (
            "mesh",
            {"columns": 2},
            TypeError,
            "columns is not an option of 'mesh', which has partial",
        ),
        ("mesh", {"partial_dtype": int}, ValueError, "partial_dtype must be None or one of"),
        ("token_ring", {"partial_dtype": np.ones(2)}, ValueError, "partial_dtype must be None or"),
        ("ring", {"check_ranks": "yes"}, ValueError, "check_ranks must be True or False, got 'yes"),
        ("ring", {"deterministic": None}, ValueError, "deterministic must be True, False or"),
        (["ring"], {}, ValueError, "name must be one of .* got \\['ring'\\]"),
        (None, {}, ValueError, "name must be one of .* got None"),
    ],
)
def test_options_are_checked_when_a_module_is_made(name, options, error, message):
    comm = MESH if name in ("mesh", "usp") else Comm("silent", 0, 4)
    with pytest.raises(error, match=message):
        make_attention(name, comm, **options)


def test_options_may_be_numbers_of_numpy():
    comm = Comm("silent", 0, 4)
    modules = [
        make_attention("ulysses", comm, head_groups=groups, check_ranks=check)
        for groups, check in ((3, True), (np.int32(3), np.bool_(True)))
    ]
    assert modules[0]._bound is modules[1]._bound
    keys = {LASP2Attention(comm, "scan", blocks=kind(2))._key for kind in (int, np.int64)}
    assert len(keys) == 1


def test_a_program_without_its_module_names_it():
    with pytest.raises(
        RuntimeError, match=r"has no attention module 'Ring\(\)/gone/0/None': make it"
    ):
        BoundStrategy.of("Ring()/gone/0/None")


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_outliving_its_group_raises(kind):
    layout = Layout.zigzag(24, 2)
    q = torch.randn(12, 2, 8, requires_grad=True)
    with fake_group(0, 2) as group:
        old = make(kind, group)
        compiled = torch.compile(old, backend="aot_eager")
        calls = [partial(attn, q, q, q, layout, causal=True) for attn in (old, compiled)]
        losses = [call().sum() for call in calls]
    with fake_group(1, 2) as group:  # torch gives it the name of the first one
        new = make(kind, group)
        new(q, q, q, layout, causal=True)
        for call in (*calls, *(loss.backward for loss in losses)):
            with pytest.raises(RuntimeError, match="group '0' has been destroyed"):
                call()


LOSSES = {"square": lambda out: out.square().sum(), "sum": torch.sum}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", KINDS)
def test_differentiating_twice_is_refused(kind, loss):
    """Also of a sum, where only what forward saved, and no gradient of out, depends on q."""
    q, k, v = (torch.randn(8, 2, 4, requires_grad=True) for _ in range(3))
    out = make(kind, Comm("one", 0, 1))(q, k, v, Layout.zigzag(8, 1), causal=True)
    (gradient,) = torch.autograd.grad(LOSSES[loss](out), q, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        gradient.sum().backward()
