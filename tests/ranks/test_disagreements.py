"""Ranks whose arguments differ find it in the headers of their messages, without check_ranks."""

import concurrent.futures
import contextlib
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import seqpar
from seqpar import Layout, Mask
from seqpar.comm.faults import heartbeat
from seqpar.comm.messages.comm import Comm, as_mesh
from tests.support.calls import local
from tests.support.changed import changed
from tests.support.ranks import Pool

TIMEOUT = 20.0  # seconds of a case's group
ONE_RANGE, OTHER_RANGE = (Mask.of_ranges([(0, 0, n, 0, 20, None, 0)]) for n in (29, 30))
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])

# Argument: its value on all ranks but rank 1, and on rank 1.
SOFTMAX = {
    "causal": ({"causal": False}, {"causal": True}),
    "window_size": ({"window_size": (9, 0)}, {"window_size": (8, 0)}),
    "prefix_lens": ({"prefix_lens": [3, 0]}, {"prefix_lens": [4, 0]}),
    "mask": ({"causal": False, "mask": ONE_RANGE}, {"causal": False, "mask": OTHER_RANGE}),
    "softmax_scale": ({}, {"softmax_scale": 0.3}),
    "softcap": ({}, {"softcap": 5.0}),
    "sinks": ({}, {"sinks": torch.zeros(4)}),
    "sinks' values": ({"sinks": torch.zeros(4)}, {"sinks": torch.ones(4)}),
    "alibi_slopes": ({}, {"alibi_slopes": SLOPES}),
    "alibi_slopes' values": ({"alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES / 2}),
    "return_lse": ({}, {"return_lse": True}),
    "return_max_logits": ({}, {"return_max_logits": True}),
    "layout": ({}, {"layout": Layout.striped}),
    "kv_layout": ({}, {"kv_layout": Layout.striped}),
    "backend": ({}, {"backend": "reference"}),
    "deterministic": ({}, {"deterministic": False}),
    "check_ranks": ({}, {"check_ranks": True}),
    "dtype": ({}, {"dtype": torch.bfloat16}),
    "heads of q": ({}, {"heads": 8}),
    "heads of k": ({}, {"kv_heads": 4}),
    "head dim of q": ({}, {"dim": 16}),
    "batch size": ({}, {"batch": 2}),
}
OF_MODULE = "check_ranks", "deterministic", "message_dtype"
STRATEGIES = "ring", "all_gather", "token_ring", "mesh", "ulysses", "usp", "disaggregated"
DECODE = {
    name: SOFTMAX[name]
    for name in (
        "causal",
        "window_size",
        "prefix_lens",
        "softmax_scale",
        "softcap",
        "sinks",
        "sinks' values",
        "alibi_slopes",
        "alibi_slopes' values",
        "return_lse",
        "kv_layout",
        "backend",
        "dtype",
        "heads of q",
        "batch size",
    )
} | {"cu_seqlens": ({"cu_seqlens": [0, 2, 4]}, {"cu_seqlens": [0, 1, 4]})}
DECAY, STATE = torch.tensor([-0.1, -0.2]), torch.zeros(2, 2, 8, 8)
LINEAR = {
    "causal": ({}, {"causal": False}),
    "log_decay": ({}, {"log_decay": DECAY}),
    "log_decay's values": ({"log_decay": DECAY}, {"log_decay": DECAY * 2}),
    "scale": ({}, {"scale": 0.5}),
    "initial_state": ({}, {"initial_state": STATE}),
    "return_state": ({}, {"return_state": True}),
    "layout": ({}, {"layout": Layout.contiguous}),
    "backend": ({}, {"backend": "reference"}),
    "dtype": ({}, {"dtype": torch.bfloat16}),
    "heads of q": ({}, {"heads": 8}),
    "batch size": ({}, {"batch": 2}),
}
CONSTANT = {"kind": "constant_decay", "log_decay": DECAY}
RECURRENT = {
    name: LINEAR[name]
    for name in (
        "scale",
        "return_state",
        "initial_state",
        "layout",
        "backend",
        "dtype",
        "batch size",
    )
} | {
    "kind": ({}, {"kind": "scalar_decay"}),
    "transport": ({}, {"transport": "tree"}),
    "blocks": ({"blocks": 1}, {"blocks": 2}),
    "log_decay": (CONSTANT, {"kind": "linear"}),
    "log_decay's values": (CONSTANT, {"kind": "constant_decay", "log_decay": DECAY * 2}),
}
WEIGHT, BIAS = torch.rand(4, 4), torch.rand(4)
HALO = {
    "activation": ({}, {"activation": "silu"}),
    "bias": ({}, {"bias": BIAS}),
    "width": ({}, {"weight": WEIGHT[:, :3]}),
    "channels": ({}, {"channels": 3}),
    "dtype": ({}, {"dtype": torch.bfloat16}),
    "layout": ({}, {"layout": Layout.striped}),
    "batch size": ({}, {"batch": 2}),
}
OF_STRATEGIES = {
    "strategy": ({}, {"strategy": "all_gather"}),
    "strategy's messages": ({}, {"message_dtype": torch.int8}),
    "strategy's codes": (
        {"message_dtype": torch.int8},
        {"message_dtype": torch.float8_e4m3fn},
    ),
}
CASES = [
    *((("options", "ring"), name) for name in OF_STRATEGIES),
    *((("softmax", strategy), name) for strategy in STRATEGIES for name in SOFTMAX),
    *((("decode", "ring"), name) for name in DECODE),
    *((("linear", transport), name) for transport in ("all_gather", "scan") for name in LINEAR),
    *((("recurrent", "scan"), name) for name in RECURRENT),
    *((("halo", ""), name) for name in HALO),
]
TABLES = {
    "options": OF_STRATEGIES,
    "softmax": SOFTMAX,
    "decode": DECODE,
    "linear": LINEAR,
    "recurrent": RECURRENT,
    "halo": HALO,
}
CU = [0, 30, 72]


def operands(options, layout, rank):
    sizes = {name: options.pop(name, size) for name, size in (("heads", 4), ("kv_heads", 2))}
    dtype, dim = options.pop("dtype", torch.float32), options.pop("dim", 8)
    tensors = [x.detach() for x in local(layout, rank, dim=dim, dtype=dtype, **sizes)]
    if batch := options.pop("batch", 0):
        return [x.expand(batch, *x.shape).contiguous() for x in tensors]
    return tensors


def made(name, group, ranks, **options):
    if name == "usp":
        return seqpar.make_attention("usp", as_mesh(Comm.of(group), 1, ranks), **options)
    if name == "mesh":
        return seqpar.make_attention("mesh", as_mesh(Comm.of(group), 1, ranks), **options)
    return seqpar.make_attention(name, group, **options)


def call(group, family, detail, options, rank, ranks):
    layout = options.pop("layout", Layout.zigzag)(CU, ranks)
    if family == "halo":
        channels, batch = options.pop("channels", 4), options.pop("batch", 1)
        dtype = options.pop("dtype", torch.float32)
        weight = options.pop("weight", WEIGHT)[:channels].to(dtype)
        x = torch.rand(batch, layout.tokens_on(rank), channels).to(dtype)
        return seqpar.causal_conv1d(x, weight, layout, group, **options)
    if family == "linear":
        q, k, v = operands(options, layout, rank)
        if q.dim() == 4 and "initial_state" in options:
            options["initial_state"] = options["initial_state"].expand(2, -1, -1, -1, -1)
        return seqpar.LASP2Attention(group, transport=detail)(q, k, v, layout, **options)
    if family == "recurrent":
        kind, blocks = options.pop("kind", "gated_delta"), options.pop("blocks", 4)
        q, k, v = operands(options, layout, rank)
        if "log_decay" not in options and kind != "linear":
            options["log_decay"] = -torch.rand(q.shape[:-2] + k.shape[-2:-1])
        if kind == "gated_delta":
            options["beta"] = torch.rand(k.shape[:-1])
        transport = options.pop("transport", detail)
        module = seqpar.RecurrentAttention(group, kind, transport, blocks=blocks)
        return module(q, k, v, layout, **options)
    if family == "decode":
        kv_layout = options.pop("kv_layout", Layout.zigzag)(CU, ranks)
        attn = made(detail, group, ranks)
        queries = Layout.contiguous(4, 1)
        q = operands(dict(options), queries, 0)[0]
        _, k, v = operands(options, kv_layout, rank)
        return attn.decode(q, k, v, kv_layout, **options)
    module = {name: options.pop(name) for name in OF_MODULE if name in options}
    attn = made(options.pop("strategy", detail), group, ranks, **module)
    if "kv_layout" in options:
        options["kv_layout"] = options["kv_layout"](CU, ranks)
    _, k, v = operands(dict(options), options.get("kv_layout", layout), rank)
    q = operands(options, layout, rank)[0]
    return attn(q, k, v, layout, **options)


def disagree(pool_group, family, detail, name):
    """What this rank raises in a group of its own for the case."""
    rank, ranks = pool_group.rank(), pool_group.size()
    options = {"causal": True} if family in ("softmax", "decode", "options") else {}
    options |= TABLES[family][name][rank == 1]
    backend = options.pop("backend", None)
    group = dist.new_group(list(range(ranks)), timedelta(seconds=TIMEOUT))
    with (
        changed(heartbeat.Clock, sleep=lambda *_: None),  # for a process that may end: this stays
        seqpar.use_backend(backend) if backend else contextlib.nullcontext(),
    ):
        try:
            call(group, family, detail, options, rank, ranks)
        except (ValueError, seqpar.PeerError) as error:
            return type(error).__name__, str(error)
    return None, "nothing was raised"


FAMILIES = sorted({family for family, _ in CASES})
QUICK = {("softmax", "ring"), ("linear", "all_gather"), ("decode", "ring"), ("halo", "")}


@pytest.mark.parametrize(
    ("ranks", "step"),  # each argument, and on 3 ranks each third one
    [
        (2, 1),
        pytest.param(3, 3, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(x, marks=() if x in QUICK else pytest.mark.exhaustive, id="-".join(x))
        for x in FAMILIES
    ],
)
def test_disagreeing_ranks_all_raise_naming_the_argument(family, ranks, step):
    # Families begin with different arguments, so that strategies together have all of them.
    cases = [name for of, name in CASES if of == family][FAMILIES.index(family) % step :: step]
    wrong = []
    with Pool(ranks, timeout=TIMEOUT) as pool:
        outcomes_of_cases = [pool(ranks, disagree, *family, case) for case in cases]
    for case, outcomes in zip(cases, outcomes_of_cases, strict=True):
        kinds, name = {kind for kind, _ in outcomes}, case.split("'")[0]
        name = "strategy" if name == "blocks" else name
        same = kinds == {"PeerError"} or (kinds == {"ValueError"} and len(set(outcomes)) == 1)
        right = all(name in text and "digest" not in text for _, text in outcomes)
        if not same or not right:
            wrong.append((case, outcomes))
    assert not wrong, "\n".join(map(str, wrong))


def called_by_two_threads(pool_group, decodes):
    """What two threads of rank 0 raise that call at once, and what rank 1 raises afterwards."""
    ranks = 2
    group = dist.new_group(list(range(ranks)), timedelta(seconds=TIMEOUT))
    if pool_group.rank() >= ranks:
        return None  # its process was needed to make the group: torch numbers groups
    attn, layout, told = seqpar.RingAttention(group), Layout.zigzag(16, ranks), torch.zeros(1)
    q, k, v = (x.detach() for x in local(layout, attn.rank))
    errors = []

    def call():
        try:
            if decodes:
                attn.decode(q[:1], k, v, layout)
            else:
                attn(q, k, v, layout, causal=True)
        except (ValueError, seqpar.PeerError) as error:
            errors.append((type(error).__name__, str(error)))

    with changed(heartbeat.Clock, sleep=lambda *_: None):
        if attn.rank:
            dist.recv(told, 0, pool_group)
            call()
        else:
            threads = [threading.Thread(target=call, name="trainer") for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            dist.send(told, 1, pool_group)
    return sorted(errors)


@pytest.mark.parametrize("decodes", [False, True])
def test_calls_of_two_threads_at_once_are_refused(pool, decodes):
    on_0, on_1, *_ = pool(4, called_by_two_threads, decodes)
    assert [kind for kind, _ in on_0] == ["PeerError", "ValueError"]
    assert [kind for kind, _ in on_1] == ["PeerError"]
    expected = "group must be used by one thread at a time: on rank 0 of 2, the thread 'trainer'"
    assert all(expected in text for _, text in (*on_0, *on_1))


def called_in_turn(group):
    """Forward in one thread, backward in another, and a call of a third."""
    attn, layout = seqpar.RingAttention(group), Layout.zigzag(16, group.size())

    def forward():
        q, k, v = local(layout, attn.rank)
        return attn(q, k, v, layout, causal=True), (q, k, v)

    def in_a_thread(function):
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            return thread.submit(function).result()

    out, inputs = in_a_thread(forward)
    gradients = in_a_thread(lambda: torch.autograd.grad(out.sum(), inputs))
    expected, inputs = forward()
    same = map(torch.equal, gradients, torch.autograd.grad(expected.sum(), inputs))
    return torch.equal(out, expected) and all(same)


def test_threads_may_call_in_turn(pool):
    assert pool(2, called_in_turn) == [True, True]


def test_every_call_option_has_a_disagreement():
    import inspect

    def options(function):
        kinds = inspect.signature(function).parameters.values()
        return {x.name for x in kinds if x.kind is x.KEYWORD_ONLY or x.name == "activation"}

    refused = {"dropout_p"}  # on each rank by itself
    assert options(seqpar.Attention.forward) - refused <= set(SOFTMAX)
    assert options(seqpar.LASP2Attention.forward) <= set(LINEAR)
    tensors = {"log_decay", "beta"}  # beta has a value for each token
    assert options(seqpar.RecurrentAttention.forward) - tensors <= set(RECURRENT)
    assert options(seqpar.causal_conv1d) - {"check_ranks"} <= set(HALO)
