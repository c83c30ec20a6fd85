"""Every option of a call through every function: the result is right, or it is refused by name."""

import inspect
import re

import pytest
import torch

import seqpar
from seqpar import Layout, Mask, ShardedCache, use_backend
from seqpar.comm.messages.comm import Comm
from seqpar.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from tests.support.cases import STRATEGIES, module
from tests.support.ranks import virtual
from tests.support.steady import SilentComm
from tests.support.tiers import few_rows

CU = [0, 11, 30]
GENERATOR = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(30, h, 8, generator=GENERATOR, dtype=torch.float64) for h in (4, 2, 2))
LAST = torch.cat([Q[9:11], Q[28:30]])  # of each document, which decode gets
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
MASK = Mask.of_ranges([(0, 0, 11, 0, 7, None, 0), (1, 0, 19, 3, 19, None, None)])
MASK_OF_LAST = Mask.of_ranges([(0, 0, 2, 0, 7, None, None), (1, 0, 2, 3, 19, None, None)])

# Option: the arguments of a call that uses it.
CALLS = {
    "causal": {"causal": True},
    "kv_layout": {"causal": False, "kv_layout": Layout.striped},
    "prefix_lens": {"causal": True, "prefix_lens": [3, 5]},
    "window_size": {"causal": True, "window_size": (4, 0)},
    "mask": {"mask": MASK},
    "softmax_scale": {"causal": True, "softmax_scale": 0.7},
    "softcap": {"causal": True, "softcap": 2.0},
    "alibi_slopes": {"causal": True, "alibi_slopes": SLOPES},
    "sinks": {"causal": True, "sinks": torch.arange(4.0, dtype=torch.float64)},
    "return_lse": {"causal": True, "return_lse": True},
    "return_max_logits": {"causal": True, "return_max_logits": True},
    "return_lse and return_max_logits": {
        "causal": True,
        "return_lse": True,
        "return_max_logits": True,
    },
    "dropout_p": {"causal": True, "dropout_p": 0.1},
}
RANKS = 3
LAYOUT, ALONE = Layout.zigzag(CU, RANKS), Layout.contiguous(CU, 1)


def expected(call, q=Q):
    """The results of one process with the reference backend: out, then lse, then max logits."""
    call = {name: value for name, value in call.items() if name not in ("kv_layout", "dropout_p")}
    attn = module("ring", Comm("alone", 0, 1))
    with use_backend("reference"):
        found = (attn.decode if q is LAST else attn)(q, K, V, ALONE, **call)
    return found if isinstance(found, tuple) else (found,)


def shards(comm, call):
    kv_layout = call["kv_layout"] if call.get("kv_layout") else LAYOUT
    return [
        layout.shard(x, comm.rank)
        for x, layout in zip((Q, K, V), (LAYOUT, kv_layout, kv_layout), strict=True)
    ]


def through_module(strategy):
    def run(comm, call):
        return module(strategy, comm)(*shards(comm, call), LAYOUT, **call)

    return run


def through_sdpa(comm, call):
    names = {"causal": "is_causal", "softmax_scale": "scale"}
    call = {names.get(name, name): value for name, value in call.items()}
    q, k, v = (x.transpose(0, 1) for x in shards(comm, call))
    found = seqpar.sdpa(q, k, v, LAYOUT, comm, enable_gqa=True, **call)
    out, *more = found if isinstance(found, tuple) else (found,)
    if call.get("return_lse"):
        more[0] = more[0].transpose(0, 1)
    return out.transpose(0, 1), *more


def through_varlen(comm, call):
    found = flash_attn_varlen_func(*shards(comm, call), layout=LAYOUT, group=comm, **call)
    out, *more = found if isinstance(found, tuple) else (found,)
    if call.get("return_lse"):
        more[0] = more[0].transpose(0, 1)
    return out, *more


def through_varlen_with_probs(comm, call):
    call = {"return_attn_probs": True} | call
    found = flash_attn_varlen_func(*shards(comm, call), layout=LAYOUT, group=comm, **call)
    out, lse, weights, *more = found
    assert weights is None and lse.shape == (4, out.shape[0])
    return out, *([lse.t()] if call.get("return_lse") else []), *more


def through_dense(comm, call):
    parts = [x[None] for x in shards(comm, call)]
    found = flash_attn_func(*parts, layout=LAYOUT, group=comm, **call)
    out, *more = found if isinstance(found, tuple) else (found,)
    if call.get("return_lse"):
        more[0] = more[0][0].t()
    return out[0], *more


def through_decode(comm, call):
    _, k, v = shards(comm, call)
    kv_layout = call.get("kv_layout", LAYOUT)
    call = {name: value for name, value in call.items() if name != "kv_layout"}
    return module("ring", comm).decode(LAST, k, v, kv_layout, **call)


def through_cache(comm, call):
    """A cache with all but the last two tokens of each document, which attend."""
    if "kv_layout" in call:
        raise ValueError("kv_layout is the cache's")
    before = Layout.contiguous([0, 9, 26], RANKS)
    kept = torch.cat([torch.arange(9), torch.arange(11, 28)])
    new = torch.cat([torch.arange(9, 11), torch.arange(28, 30)])
    cache = ShardedCache(module("ring", comm), before)
    cache.put(0, *(before.shard(x[kept], comm.rank) for x in (K, V)))
    cache.extend(2)
    return cache.attend(0, LAST, K[new], V[new], **call)


FUNCTIONS = {f"module {strategy}": through_module(strategy) for strategy in STRATEGIES} | {
    "sdpa": through_sdpa,
    "flash_attn_func": through_dense,
    "flash_attn_varlen_func": through_varlen,
    "flash_attn_varlen_func with probs": through_varlen_with_probs,
    "decode": through_decode,
    "ShardedCache.attend": through_cache,
}
REFUSED = {
    "dropout_p": set(FUNCTIONS),
    "return_max_logits": {"decode", "ShardedCache.attend"},
    "return_lse and return_max_logits": {"decode", "ShardedCache.attend"},
    "mask": {"flash_attn_func", "ShardedCache.attend"},
    "prefix_lens": {"ShardedCache.attend"},
    "kv_layout": {"ShardedCache.attend"},
}


def test_every_option_has_a_call():
    parameters = inspect.signature(seqpar.Attention.forward).parameters.values()
    assert {x.name for x in parameters if x.kind is x.KEYWORD_ONLY} <= set(CALLS)


@few_rows()
@pytest.mark.parametrize("option", CALLS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_option_is_right_or_refused_by_name(function, option):
    call, decodes = dict(CALLS[option]), function in ("decode", "ShardedCache.attend")
    if "kv_layout" in call:
        call["kv_layout"] = call["kv_layout"](CU, RANKS)
    if decodes and "mask" in call:
        call["mask"] = MASK_OF_LAST

    def run(comm):
        try:
            return FUNCTIONS[function](comm, call)
        except ValueError as refusal:
            return str(refusal), comm.sent_messages

    results = virtual(RANKS, run)
    if any(isinstance(result, tuple) and isinstance(result[0], str) for result in results):
        assert function in REFUSED.get(option, ()), results
        name = option.split(" and ")[-1]
        assert all(text.startswith(name) and not sent for text, sent in results), results
        return
    wanted = expected(call, LAST if decodes else Q)
    for rank, result in enumerate(results):
        result = result if isinstance(result, tuple) else (result,)
        assert len(result) == len(wanted)
        for x, y in zip(result, wanted, strict=True):
            if y.shape[0] == 30:
                y = LAYOUT.shard(y, rank)
            assert x.shape == y.shape and torch.allclose(x, y, rtol=0, atol=1e-12)


WRONG = {
    "causal": ["yes", None],
    "is_causal": ["yes", None],
    "attn_mask": [torch.ones(3)],
    "dropout_p": [0.1, "x"],
    "softmax_scale": ["x", float("nan"), torch.ones(3)],
    "scale": ["x", float("nan"), torch.ones(3)],
    "enable_gqa": ["x", False],
    "axes": ["x", 3],
    "window_size": [3, (1,), (-5, 0), ("a", 0)],
    "softcap": [-1.0, "x"],
    "alibi_slopes": ["x", torch.ones(3), SLOPES.bfloat16()],
    "deterministic": ["x", None],
    "return_attn_probs": ["x"],
    "block_table": [torch.ones(1)],
    "cu_seqlens_q": ["ab", [1, 30], [0, 20, 10], [0, 30], 3.5, [[0, 30]], [0, 2**40], 7, True],
    "cu_seqlens_k": ["ab", [1, 30], [0, 20, 10], [0, 30], 3.5, [[0, 30]], [0, 2**40], 7, True],
    "max_seqlen_q": [3, 17.5, "x", -1],
    "max_seqlen_k": [3, 17.5, "x", -1],
    "kv_layout": [3, Layout.zigzag(30, RANKS), Layout.zigzag(CU, 2)],
    "layout": [3, None, Layout.zigzag(CU, 2), Layout.zigzag([0, 11, 60], RANKS)],
    "group": [3, None],
    "strategy": [3, "x", None],
    "sinks": ["x", torch.ones(3)],
    "prefix_lens": ["x", [1], [1, 2, 3], [-1, 0]],
    "mask": ["x"],
    "return_lse": ["x"],
    "return_max_logits": ["x"],
}
OPERANDS = ["x", None, Q[:1], Q[None, None], Q[0], Q[..., :3], Q[:, :3], Q.int(), Q.half()]
ENTRANCES = {
    "sdpa": (seqpar.sdpa, ("query", "key", "value"), {"enable_gqa": True}),
    "flash_attn_func": (flash_attn_func, ("q", "k", "v"), {}),
    "flash_attn_varlen_func": (flash_attn_varlen_func, ("q", "k", "v"), {}),
}


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_errors_begin_with_an_argument_of_the_function(entrance):
    function, names, options = ENTRANCES[entrance]
    signature = set(inspect.signature(function).parameters) - {"options"}
    others = {"sinks", "prefix_lens", "mask", "return_lse", "return_max_logits"}
    assert signature <= {*WRONG, *names}, "an argument has no wrong value"
    cases = [(name, value) for name in WRONG if name in signature | others for value in WRONG[name]]
    cases += [(name, value) for name in names for value in OPERANDS]

    def run(comm, name, value):
        q, k, v = shards(comm, {})
        if entrance == "sdpa":
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        if entrance == "flash_attn_func":
            q, k, v = q[None], k[None], v[None]
        call = dict(zip(names, (q, k, v), strict=True)) | {"layout": LAYOUT, "group": comm}
        if name == "mask" and entrance == "sdpa":
            call["attn_mask"] = None
        try:
            function(**call | options | {name: value})
        except (ValueError, TypeError) as error:
            return str(error), comm.sent_messages
        return "nothing was raised", 0

    wrong = []
    for name, value in cases:
        text, sent = run(SilentComm(1, RANKS), name, value)
        first = re.match(r"\w*", text)[0]
        if first not in signature | others or sent:
            wrong.append((name, value if not isinstance(value, torch.Tensor) else "", text))
    assert not wrong, "\n".join(map(str, wrong))


WRONG_OF_OTHERS = {
    "group": [3, None],
    "layout": [3, None, Layout.zigzag(CU, 2)],
    "strategy": [3, "x", None],
    "buffers": [3, [3], [Q.clone().requires_grad_()], [Q[:4]], [Q, Q]],
    "buffer_seq_dims": [3, [0, 0], ["x"], [7]],
    "no_restore_buffers": [3, [Q[:2]]],
    "replicated_keys": [3, "x", ["x"], [0], [1.5]],
    "x": ["x", None, Q[0, 0], Q[:3, 0], Q[:10, 0].int()],
    "weight": ["x", None, Q[0, 0], Q[:3, 0], torch.ones(8, 4).int()],
    "bias": ["x", torch.ones(3), torch.ones(8).int()],
    "activation": ["x", 3],
    "check_ranks": ["x", None],
}


def entered(*arguments, **options):
    with seqpar.context_parallel(*arguments, **options):
        pass


@pytest.mark.parametrize("name", WRONG_OF_OTHERS)
def test_errors_of_other_functions_begin_with_an_argument(name):
    comm = SilentComm(1, RANKS)
    x, weight = LAYOUT.shard(Q[:, 0], 1), torch.ones(8, 4, dtype=torch.float64)
    calls = [
        (seqpar.context_parallel, {"group": comm, "layout": LAYOUT}),
        (seqpar.causal_conv1d, {"x": x, "weight": weight, "layout": LAYOUT, "group": comm}),
        (seqpar.token_shift, {"x": x, "layout": LAYOUT, "group": comm}),
    ]
    for function, arguments in calls:
        known = set(inspect.signature(function).parameters)
        assert known - {"options"} <= set(WRONG_OF_OTHERS) | {"options"}
        for value in WRONG_OF_OTHERS[name] if name in known else ():
            changed = arguments | {name: value}
            if name == "buffers" and isinstance(value, list):
                changed["buffer_seq_dims"] = [0] * len(value)
            if name in ("buffer_seq_dims", "no_restore_buffers"):
                changed = {"buffers": [Q], "buffer_seq_dims": [0]} | changed
            run = entered if function is seqpar.context_parallel else function
            with pytest.raises((ValueError, TypeError)) as raised:
                run(**changed)
            assert re.match(r"\w*", str(raised.value))[0] in known, (function, str(raised.value))
    assert not comm.sent_messages
