"""Walk the public interface with malformed values: errors are ours, and name the argument."""

import copy
import datetime
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import seqpar
from seqpar import Layout, Mask, balance
from seqpar.attention.unknown_arguments import call_arguments
from seqpar.comm.messages.comm import Comm
from seqpar.core.arguments import shown
from seqpar.simulate.recording.program import Program

ONE = Comm("malformed", 0, 1)
MESH = copy.copy(ONE)
MESH.shape = (1, 1)
LAYOUT = Layout.zigzag([0, 10, 24], 1)
X = torch.zeros(24, 2, 8)
STATE = torch.zeros(2, 2, 8, 8)
CALL = {"q": X, "k": X, "v": X, "layout": LAYOUT, "causal": True}
SOFTMAX = CALL | {
    "kv_layout": LAYOUT,
    "window_size": (3, 0),
    "softmax_scale": 1.0,
    "softcap": 2.0,
    "alibi_slopes": torch.ones(2),
    "sinks": torch.zeros(2),
    "return_lse": True,
    "return_max_logits": True,
    "dropout_p": 0.0,
}
RANGES = [(0, 0, 8, 0, 8, None, 0), (1, 2, 5, 1, 3, None, None)]
MASKED = {name: x for name, x in CALL.items() if name != "causal"} | {
    "mask": seqpar.Mask.of_ranges(RANGES)
}
PREFIX = CALL | {"prefix_lens": [1, 2]}
LINEAR = CALL | {
    "log_decay": torch.zeros(2),
    "scale": 1.0,
    "initial_state": STATE,
    "return_state": True,
}
STEP = {"q": X[:2], "k": X[:2], "v": X[:2], "state": STATE, "log_decay": torch.zeros(2)}
MODEL = balance.Model.preset("llama-8b")
CLUSTER = replace(balance.Cluster.preset("1x8-h100"), devices_per_node=2, nics=2)
ROUTING = seqpar.Routing(1)
MODULE = {"group": ONE, "check_ranks": False, "deterministic": True, "routing": ROUTING}
SIZES = {"nics": 2, "least_bytes": 1, "chunk_bytes": 1}
AUTO = {"group": ONE, "check_ranks": False, "deterministic": True}
AUTO |= {"cluster": CLUSTER, "strategies": ["ring"], "backward": True, "once": False}
RING, LASP2 = seqpar.RingAttention(ONE), seqpar.LASP2Attention(ONE)
KDA = seqpar.RecurrentAttention(ONE, "kda")
RECURRENT = {name: x for name, x in CALL.items() if name != "causal"}
RECURRENT |= {"log_decay": -X.abs(), "beta": X[..., 0].sigmoid(), "scale": 1.0}
RECURRENT |= {"initial_state": STATE, "return_state": True}
HEADS_FIRST = X.transpose(0, 1)
SDPA = {"query": HEADS_FIRST, "key": HEADS_FIRST, "value": HEADS_FIRST, "layout": LAYOUT}
SDPA |= {"group": ONE, "strategy": "ring", "attn_mask": None, "dropout_p": 0.0}
SDPA |= {"is_causal": True, "scale": 1.0, "enable_gqa": False, "kv_layout": LAYOUT, "axes": None}
PARTIAL = {"outs": [X, X], "lses": [X[..., 0], X[..., 0]]}


def enter(name):
    with seqpar.use_backend(name):
        pass


def in_context(group, layout, strategy, **options):
    with seqpar.context_parallel(group, layout, strategy, **options):
        pass


def put(k, v):
    cache = seqpar.ShardedCache(RING, Layout.zigzag(24, 1))
    cache.put(0, k, v)
    return cache


def attend_to(**arguments):
    cache = put(X, X)
    cache.extend()
    with torch.no_grad():
        cache.attend(0, **arguments)


def write(path):
    seqpar.Trace().write("/dev/null" if isinstance(path, str) else path)


def auto(cluster, **options):
    seqpar.AutoAttention(cluster=CLUSTER if cluster is None else cluster, **options)  # no profile


def offload(ratio, **options):
    with seqpar.offload(ratio, **options):
        pass


# Of each name, what is called, and with which good arguments.
CALLS = {
    "offload": (offload, {"ratio": 0.5, "least": 4, "ahead": 1, "simulate": True}),
    "make_attention": (seqpar.make_attention, MODULE | {"name": "ring"}),
    "AutoAttention": (auto, AUTO),
    "RingAttention": (seqpar.RingAttention, MODULE),
    "AllGatherAttention": (seqpar.AllGatherAttention, MODULE),
    "DisaggregatedAttention": (
        seqpar.DisaggregatedAttention,
        MODULE | {"plan": None, "keep": "home", "tolerance": 0.05},
    ),
    "UlyssesAttention": (seqpar.UlyssesAttention, MODULE | {"head_groups": 2, "keep": "heads"}),
    "TokenRingAttention": (seqpar.TokenRingAttention, MODULE | {"partial_dtype": None}),
    "USPAttention": (
        seqpar.USPAttention,
        {"mesh": MESH, "outer": "ring", "check_ranks": False, "routing": ROUTING}
        | {"head_groups": 2, "keep": "heads"},
    ),
    "MeshAttention": (
        seqpar.MeshAttention,
        {"mesh": MESH, "check_ranks": False, "routing": ROUTING, "partial_dtype": None},
    ),
    "best_mesh": (
        seqpar.best_mesh,
        {"ranks": 8, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 4, "causal": True}
        | {"dtype": torch.float32, "partial_dtype": None, "backward": False},
    ),
    "LASP2Attention": (
        seqpar.LASP2Attention,
        {"group": ONE, "transport": "scan", "blocks": 2, "check_ranks": False, "routing": None},
    ),
    "RecurrentAttention": (
        seqpar.RecurrentAttention,
        {"group": ONE, "kind": "kda", "transport": "scan", "blocks": 2}
        | {"check_ranks": False, "routing": None},
    ),
    "Routing": (seqpar.Routing, {"node_size": 2} | SIZES),
    "Routing, with nodes": (seqpar.Routing, {"nodes": [0, 0, 1, 1]} | SIZES),
    "Attention": (RING, SOFTMAX),
    "Attention, with a prefix": (RING, PREFIX),
    "Attention, with a mask": (RING, MASKED),
    "Attention.mask_area": (RING.mask_area, SOFTMAX),
    "Attention.traffic": (RING.traffic, SOFTMAX | {"rank": 0}),
    "LASP2Attention's call": (LASP2, LINEAR),
    "LASP2Attention.traffic": (LASP2.traffic, LINEAR | {"rank": 0}),
    "LASP2Attention.step": (LASP2.step, STEP | {"scale": 1.0}),
    "RecurrentAttention's call": (KDA, RECURRENT),
    "RecurrentAttention.traffic": (KDA.traffic, RECURRENT | {"rank": 0}),
    "causal_conv1d": (
        seqpar.causal_conv1d,
        {"x": X[..., 0], "weight": torch.zeros(2, 4), "layout": LAYOUT, "group": ONE}
        | {"bias": torch.zeros(2), "activation": "silu"},
    ),
    "token_shift": (seqpar.token_shift, {"x": X[..., 0], "layout": LAYOUT, "group": ONE}),
    "RecurrentAttention.step": (
        KDA.step,
        {name: x[:2] for name, x in RECURRENT.items() if name in ("q", "k", "v", "log_decay")}
        | {"beta": X[:2, :, 0], "state": STATE, "scale": 1.0},
    ),
    "sdpa": (seqpar.sdpa, SDPA),
    "context_parallel": (
        in_context,
        {"group": ONE, "layout": LAYOUT, "strategy": "ring"}
        | {"buffers": [torch.zeros(24)], "buffer_seq_dims": [0], "no_restore_buffers": []},
    ),
    "Mask.of_ranges": (seqpar.Mask.of_ranges, {"ranges": RANGES}),
    "ShardedCache": (
        seqpar.ShardedCache,
        {"attn": RING, "layout": Layout.zigzag(24, 1), "block": 4, "reserve": 8},
    ),
    "ShardedCache.put": (put, {"k": X, "v": X}),
    "ShardedCache.attend": (attend_to, {"q": X[:1], "k": X[:1], "v": X[:1], "softcap": 1.0}),
    "recommend": (seqpar.recommend, {"model": MODEL, "cluster": CLUSTER, "lengths": [8]}),
    "merge": (seqpar.merge, PARTIAL),
    "shift_labels": (
        seqpar.shift_labels,
        {"ids": torch.zeros(24, dtype=torch.int64), "cu_seqlens": [0, 24]},
    ),
    "use_backend": (enter, {"name": "aten"}),
    "checkpoint": (seqpar.checkpoint, {"function": list}),
    "save_attention": (
        seqpar.save_attention,
        {"ctx": None, "op": torch.ops.aten.sin.default},
    ),
    "exposure": (seqpar.exposure, {"group": ONE, "step": list, "rounds": 1}),
    "Trace.gather": (seqpar.Trace().gather, {"group": ONE}),
    "Trace.write": (write, {"path": "nothing"}),
}
COSTS = balance.Costs(CLUSTER, MODEL)
TASKS = balance.Tasks.of(4, 4, 4)
CAUSAL = Mask.of(True, (-1, -1), None, LAYOUT.geometry)
ROWS = balance.RowBytes.of(2, 2, 8)
SIZES_OF_ROWS = {"heads": 2, "kv_heads": 2, "head_dim": 8, "value_dim": 8, "itemsize": 2}
DECODE = {"q": X[:2], "k_cache": X, "v_cache": X, "kv_layout": LAYOUT, "cu_seqlens": [0, 1, 2]}
PREPARED = {"heads": 2, "head_dim": 8, "dtype": torch.float32, "kv_heads": 2, "device": "cpu"}
SECONDS = {"forward": [1.0, 1.0], "backward": [2.0, 2.0], "nbytes": 0, "stages": 2}


def decode(**arguments):
    with torch.no_grad():
        RING.decode(**arguments)


def select(sequences):
    put(X, X).select(sequences)


def connect(**arguments):
    deadlines = {"connect": 0.001}
    seqpar.ServerPool.connect("ipc:///nobody/server", deadlines=deadlines, **arguments).close()


# Of names in other public modules, and of methods.
MORE_CALLS = {
    "Attention.decode": (decode, DECODE | {"causal": True, "return_lse": False}),
    "Attention.preparation": (RING.preparation, PREPARED | {"backward": True}),
    "LASP2Attention.preparation": (LASP2.preparation, PREPARED | {"backward": True}),
    "Layout.from_position_ids": (
        Layout.from_position_ids,
        {"position_ids": torch.arange(24), "ranks": 2, "kind": "zigzag"},
    ),
    "ShardedCache.select": (select, {"sequences": [0]}),
    "ServerPool.connect": (
        connect,
        {"transports": ["grpc"], "home": True, "depth": 2},
    ),
    "plan": (
        balance.plan,
        {"lengths": [5, 7], "cluster": CLUSTER, "model": MODEL, "capacity": 100}
        | {"method": "zigzag", "checkpointing": "none", "remap": False, "heads": 1},
    ),
    "token_balanced": (
        balance.token_balanced,
        {"layout": Layout.zigzag(24, 2), "cluster": CLUSTER},
    ),
    "RowBytes.of": (balance.RowBytes.of, SIZES_OF_ROWS),
    "RowBytes.sent": (balance.RowBytes.sent, SIZES_OF_ROWS | {"backward": 2.5}),
    "disaggregate_stages": (
        balance.disaggregate_stages,
        {"stages": [balance.Stage(LAYOUT, CAUSAL, None)], "servers": 1, "row_bytes": ROWS},
    ),
    "Costs": (balance.Costs, {"cluster": CLUSTER, "model": MODEL}),
    "Costs.attention": (COSTS.attention, {"tasks": TASKS, "backward": False, "heads": 2}),
    "Costs.attention_call": (COSTS.attention_call, {"tasks": TASKS, "backward": False}),
    "Costs.span_work": (partial(COSTS.span_work, [0], [4]), {"backward": False}),
    "Costs.tokenwise": (COSTS.tokenwise, {"tokens": 3, "backward": False}),
    "Costs.token_capacity": (
        COSTS.token_capacity,
        {"checkpointing": "none", "ranks": 2, "stage": 3},
    ),
    "Costs.message": (COSTS.message, {"nbytes": [1.0], "link": "inside"}),
    "Tasks.of": (balance.Tasks.of, {"rows": 1, "keys": 1, "pairs": 1, "windowed": 0.0}),
    "pipeline": (seqpar.simulate.pipeline, SECONDS | {"cluster": CLUSTER, "schedule": "1f1b"}),
    "play": (seqpar.simulate.play, {"programs": [Program()], "cluster": CLUSTER}),
    "masks.image_blocks": (
        partial(seqpar.masks.image_blocks, [0, 10, 24]),
        {"blocks": [(0, 2, 4)]},
    ),
    "masks.from_magi": (
        seqpar.masks.from_magi,
        {"q_ranges": [[0, 4]], "k_ranges": [[0, 4]], "attn_types": ["full"]},
    ),
    "causal_work": (seqpar.layout.plot.causal_work, {"layout": LAYOUT}),
}
NO_CALLS = {  # what has no arguments, or takes no other than we give it
    *("Exposure", "Group", "PeerError", "SAVED_OPS", "Span", "Trace", "__version__", "trace"),
    "Layout",  # tests/unit/layout
    *("ServerCache", "ServerPool", "ServersError"),  # tests/unit/servers
}
HUGE = 10**5000  # which Python refuses to print
VALUES = [
    *(None, True, 0, -1, 3, 1.5, float("nan"), float("inf"), -float("inf"), 1j, 10**30, HUGE),
    *("nope", "ring", b"x", [], [1], [0.5, 1.0], [[1], [1, 2]], (1, 2, 3), (0, HUGE), {}, {1: 2}),
    *({1, 2}, range(3), slice(3), Ellipsis, NotImplemented, object(), int, lambda: 3),
    *(datetime.date(2020, 1, 1), np.datetime64("2020-01-01"), np.float32(2), np.uint64(2**64 - 1)),
    *(np.zeros(3), np.array([1, 2], object), np.array("a"), np.ones((2, 2), bool)),
    *(torch.zeros(3), torch.tensor(5.0), torch.tensor(7), torch.tensor([0, 2**62]), X.int()),
    *(torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.complex64), X[:, :, :0]),
    *(torch.zeros(2, device="meta"), torch.eye(3).to_sparse(), X.to(torch.float8_e4m3fn)),
    *(torch.float32, torch.device("cpu"), Layout.zigzag(8, 2), ONE),
]


@pytest.mark.parametrize("name", CALLS | MORE_CALLS)
def test_errors_are_ours_and_name_the_argument(name):
    function, good = (CALLS | MORE_CALLS)[name]
    function(**good)
    wrong = []
    for argument in good:
        for value in VALUES:
            try:
                function(**good | {argument: value})
            except (ValueError, TypeError) as error:
                if argument in str(error):
                    continue
                wrong.append((argument, value, error))
            except Exception as error:
                wrong.append((argument, value, error))
    assert not wrong, [f"{x}={shown(value)}: {error!r:.200}" for x, value, error in wrong]


@pytest.mark.parametrize(
    ("module", "good"),
    [(RING, SOFTMAX), (RING, PREFIX), (RING, MASKED), (LASP2, LINEAR), (KDA, RECURRENT)],
)
def test_unsupported_always_answers(module, good):
    for argument in [*good, "typo"]:
        for value in VALUES:
            answer = module.unsupported(**good | {argument: value})
            assert answer is None or argument in answer, (argument, shown(value), answer)


def test_the_walk_leaves_nothing_out():
    walked = {name.split(".")[0].split(",")[0].split("'")[0] for name in CALLS}
    assert walked | NO_CALLS == set(seqpar.__all__)
    for module, goods in ((RING, SOFTMAX | PREFIX | MASKED), (LASP2, LINEAR), (KDA, RECURRENT)):
        assert set(call_arguments(module.forward)) == set(goods)
