"""LASP-2 against the recurrence, on real ranks and virtual ones: exactness, causality, bytes, overlap, refusals."""

import dataclasses
import functools
import itertools
import re

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st

import seqpar
from seqpar import LASP2Attention, Layout, use_backend
from seqpar.backends.linear import aten
from seqpar.comm import Comm
from seqpar.linear import Recurrence, Spans, backward, forward
from tests.cases import rms
from tests.linear_cases import LinearCase, assert_right, linear_cases, oracle, run
from tests.ranks import virtual


def is_refused(case):
    """Whether a document is dealt to some rank in more than 4 spans so short that their states outweigh their tokens."""
    least = case.dim * case.value_dim * case.exact.itemsize / ((case.dim + case.value_dim) * case.dtype.itemsize)
    for rank in range(case.layout.ranks):
        for _, spans in itertools.groupby(case.layout.spans(rank), key=lambda span: span.document):
            lengths = [span.stop - span.start for span in spans]
            if case.causal and len(lengths) > 4 and np.mean(lengths) < least:
                return True
    return False


def assert_equals_the_oracle(pool, ranks, case):
    if is_refused(case):
        answers = pool.each(ranks, run, case)
        assert all(kind == "error" and "layout must have spans of at least" in value[1] for kind, value in answers)
        return
    expected = oracle(case)
    for got in pool(ranks, run, case):
        assert_right(got, expected, case.dtype)


@settings(max_examples=150)
@given(drawn=linear_cases(torch.float64))
def test_equals_the_recurrence(pool, drawn):
    """Any layout, ranks, chunk size and number of blocks, with and without decay, initial and final states."""
    assert_equals_the_oracle(pool, *drawn)


@settings(max_examples=50)
@given(drawn=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]).flatmap(linear_cases))
def test_short_precisions_stay_near_it(pool, drawn):
    assert_equals_the_oracle(pool, *drawn)


@functools.cache
def on_one_device(dtype):
    """A case of 1,024 tokens, what is expected of it, and the RMS errors of one rank."""
    case = LinearCase(Layout.zigzag([0, 700, 1024], 1), decay=0.02, dtype=dtype, dim=32, value_dim=32, chunk=64)
    expected, alone = oracle(case), virtual(1, run, case)[0]
    return case, expected, {name: rms(alone[name] - y) for name, y in expected.items()}


@pytest.mark.parametrize("transport", ["all_gather", "scan"])
@pytest.mark.parametrize("ranks", [2, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_at_most_1_35_times_that_of_one_device(dtype, ranks, transport):
    case, expected, errors = on_one_device(dtype)
    got = virtual(ranks, run, dataclasses.replace(case, layout=Layout.zigzag([0, 700, 1024], ranks), transport=transport))[0]
    for name, y in expected.items():
        assert rms(got[name] - y) <= 1.35 * errors[name], name


def test_same_bits_each_time():
    case = LinearCase(Layout.zigzag([0, 90, 200], 4), dtype=torch.float32)
    for transport in ("all_gather", "scan"):
        first, second = (virtual(4, run, dataclasses.replace(case, transport=transport))[1] for _ in range(2))
        assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("backend", ["aten", "reference"])
def test_a_perturbed_token_moves_nothing_before_it_nor_in_other_documents(backend):
    """Nor, within a chunk, the token just before it: LASP-2's published masked operator had no mask on the diagonal block."""
    cu, changed = [0, 150, 330], 40
    layout = Layout.zigzag(cu, 2)
    q, k, v = (torch.randn(330, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3))

    def call(comm, k, v):
        return layout.unshard(LASP2Attention(comm)(*(layout.shard(x, comm.rank) for x in (q, k, v)), layout), comm)

    with use_backend(backend):
        before = virtual(2, call, k, v)[0]
        k, v = k.clone(), v.clone()
        k[changed] += 1
        v[changed] += 1
        moved = (virtual(2, call, k, v)[0] != before).flatten(1).any(1)
    assert not moved[:changed].any() and moved[changed:150].all() and not moved[150:].any()


def test_no_output_is_zero_and_none_is_lost():
    """300 tokens, no multiple of a block: published code returned 256 zero rows, or a tail of uninitialised memory."""
    for causal in (True, False):
        case = LinearCase(Layout.contiguous(300, 1), causal=causal, decay=None, chunk=128)
        out = virtual(1, run, case)[0]["out"]
        assert (abs(out).max((1, 2)) > 0).all()
        assert_right({"out": out}, {"out": oracle(case)["out"]}, case.dtype)


@pytest.mark.parametrize("log_decay", [-1e-5, -1e-7])
def test_decay_over_100_000_positions_is_exact(log_decay):
    """A first token's share at position 100,000, where rounding λ^C once a chunk would be off by 800 × 2⁻²⁵ = 2.4e-5."""
    tokens, ranks = 100_000, 4
    layout = Layout.contiguous(tokens, ranks)
    decay = torch.tensor([log_decay], dtype=torch.float64)
    k = torch.zeros(tokens, 1, 1)
    k[0] = 1

    def call(comm):
        aten.CHUNK = 128
        q, mine = (layout.shard(x, comm.rank) for x in (torch.ones(tokens, 1, 1), k))
        return LASP2Attention(comm)(q, mine, mine, layout, log_decay=decay)

    out = torch.cat(virtual(ranks, call))[:, 0, 0].double()
    expected = torch.exp(torch.arange(tokens) * log_decay)
    assert ((out - expected).abs() / expected).max() <= 8 * 2**-24  # one rounding each in a chunk, a block, and a rank


def test_documents_go_on_from_one_batch_to_the_next():
    """Two halves, with the state passed on, are the whole: outputs, and gradients through the state."""
    whole, half = Layout.zigzag([0, 120, 200], 2), Layout.zigzag([0, 60, 100], 2)
    case = LinearCase(whole)
    x = [t.clone().requires_grad_() for t in case.inputs()[:3]]
    first = torch.cat([torch.arange(60), torch.arange(120, 160)])
    second = torch.cat([torch.arange(60, 120), torch.arange(160, 200)])

    def in_parts(comm):
        lin, outs, state = LASP2Attention(comm), [], None
        mine = [t.detach().clone().requires_grad_() for t in x]
        for rows in (first, second):
            parts = (half.shard(t[rows], comm.rank) for t in mine)
            out, state = lin(*parts, half, log_decay=case.log_decay, initial_state=state, return_state=True)
            outs.append(out)
        torch.cat(outs).square().sum().backward()
        return [half.unshard(out.detach(), comm) for out in outs], [t.grad for t in mine]

    def at_once(comm):
        parts = [whole.shard(t.detach(), comm.rank).requires_grad_() for t in x]
        out = LASP2Attention(comm)(*parts, whole, log_decay=case.log_decay)
        out.square().sum().backward()
        return whole.unshard(out.detach(), comm), [whole.unshard(t.grad, comm) for t in parts]

    out, gradients = virtual(2, at_once)[0]
    parts, other = virtual(2, in_parts)
    torch.testing.assert_close(parts[0][0], out[first])
    torch.testing.assert_close(parts[0][1], out[second])
    for expected, mine, theirs in zip(gradients, parts[1], other[1], strict=True):
        torch.testing.assert_close(mine + theirs, expected)


def test_decoding_steps_are_the_parallel_form():
    case = LinearCase(Layout.contiguous([0, 20, 40, 60], 1), returned=True)
    expected = oracle(case)
    q, k, v = (x.unflatten(0, (3, 20)) for x in case.inputs()[:3])
    state, outs = torch.zeros(3, case.kv_heads, case.dim, case.value_dim, dtype=torch.float64), []
    for i in range(20):
        out, state = LASP2Attention.step(q[:, i], k[:, i], v[:, i], state, case.log_decay, case.scale)
        outs.append(out)
    assert_right({"out": torch.stack(outs, 1).flatten(0, 1).numpy()}, {"out": expected["out"]}, torch.float64)
    assert_right({"state": state.numpy()}, {"state": expected["state"]}, torch.float64)


def sent_by(group, case):
    lin = LASP2Attention(group, transport=case.transport)
    comm = lin.engine.comm
    q, k, v, dout = (case.layout.shard(x, comm.rank, 1).requires_grad_() for x in case.inputs()[:4])
    counts = [(comm.sent_bytes, comm.sent_messages)]
    out = lin(q, k, v, case.layout, return_state=case.returned)
    out = out[0] if case.returned else out
    counts.append((comm.sent_bytes, comm.sent_messages))
    out.backward(dout)
    counts.append((comm.sent_bytes, comm.sent_messages))
    return np.diff(counts, axis=0).tolist()


@pytest.mark.parametrize("tokens", [64, 640])
@pytest.mark.parametrize("transport", ["all_gather", "scan"])
def test_bytes_do_not_depend_on_the_length(pool, transport, tokens):
    """S a state. Contiguous: to each later rank (all_gather) or the next (scan); zigzag: to each (all_gather), or 2 (scan)."""
    ranks, dtype = 4, torch.bfloat16
    case = LinearCase(Layout.contiguous(tokens, ranks), batch=2, transport=transport, dtype=dtype)
    state = 2 * case.kv_heads * case.dim * case.value_dim * 4
    sent = np.array(pool(ranks, sent_by, case))[:, :, 0]
    later = [3, 2, 1, 0] if transport == "all_gather" else [1, 1, 1, 0]
    assert (sent == np.stack([later, later[::-1]], 1) * state).all()
    zigzag = dataclasses.replace(case, layout=Layout.zigzag(tokens, ranks))
    sent = np.array(pool(ranks, sent_by, zigzag))[:, :, 0]
    # scan: the last rank's two chunks are one span, and the first rank's last chunk is the last of all
    expected = [[3, 3]] * 4 if transport == "all_gather" else [[1, 1], [2, 2], [2, 2], [1, 1]]
    assert (sent == np.array(expected) * state).all()


def test_documents_that_do_not_cross_ranks_send_nothing(pool):
    """The second of three documents crosses; only its state travels, in one message, unless final states are wanted."""
    case = LinearCase(Layout.from_spans([[(0, 0, 9), (1, 0, 5)], [(1, 5, 20), (2, 0, 7)]], [0, 9, 29, 36]), batch=1)
    state = case.kv_heads * case.dim * case.value_dim * 8
    assert pool(2, sent_by, case) == [[[state, 1], [0, 0]], [[0, 0], [state, 1]]]
    returned = dataclasses.replace(case, returned=True)
    assert [x[0][0] for x in pool(2, sent_by, returned)] == [2 * state, 2 * state]


def events(group, case):
    lin = LASP2Attention(group, transport=case.transport)
    q, k, v = (case.layout.shard(x, lin.engine.comm.rank).requires_grad_() for x in case.inputs()[:3])
    with seqpar.trace() as trace:
        lin(q, k, v, case.layout).sum().backward()
    return [(event.kind, event.what, event.start, event.stop) for event in trace.events]


@pytest.mark.parametrize("layout", [Layout.zigzag, Layout.contiguous])
def test_states_are_posted_before_the_work_that_hides_them(pool, layout):
    """Also on a rank that only sends, as the first of a contiguous document does."""
    case = LinearCase(layout(3000, 2), dtype=torch.float32, dim=32, value_dim=32)
    for found in pool(2, events, case):
        for what in ("lasp2 forward", "lasp2 backward"):
            (flight,) = [x for x in found if x[:2] == ("flight", what)]
            (wait,) = [x for x in found if x[:2] == ("wait", what)]
            states, local, _ = [x for x in found if x[:2] == ("compute", what)]
            assert states[3] <= flight[2] <= local[2] and local[3] <= wait[2]


LAYOUT = Layout.zigzag([0, 10, 24], 2)
REFUSALS = [
    ({"q": (11, 2, 8)}, "q must have the 12 tokens its layout gives this rank, got 11 \\(rank 0 of 2\\)"),
    ({"k": (12, 1, 4)}, "k must have q's head dim, 8, got 4"),
    ({"q": (12, 3, 8), "k": (12, 2, 8), "v": (12, 2, 8)}, "q must have a multiple of k's 2 heads, got 3"),
    ({"layout": Layout.zigzag(36, 3)}, "layout must be for the group's 2 ranks, got one for 3"),
    ({"layout": 5}, "layout must be a seqpar.Layout, got int"),
    (
        {"layout": Layout.striped(24, 2, 1)},
        "layout must have spans of at least 4 tokens.* got 12 of 1 on average in document 0",
    ),
    ({"causal": 1}, "causal must be True or False, got 1"),
    ({"causal": False, "log_decay": torch.zeros(1)}, "log_decay must be None with causal=False"),
    ({"log_decay": torch.zeros(2)}, "log_decay must be \\(1,\\), one a KV head, in fp32 or fp64, got \\(2,\\)"),
    ({"log_decay": torch.zeros(1).half()}, "log_decay must be .* got \\(1,\\) of torch.float16"),
    ({"log_decay": torch.tensor([0.5])}, "log_decay must be finite and at most 0, got \\[0.5\\]"),
    ({"log_decay": torch.tensor([-torch.inf])}, "log_decay must be finite and at most 0"),
    ({"log_decay": torch.tensor([torch.nan])}, "log_decay must be finite and at most 0"),
    ({"log_decay": torch.zeros(1, requires_grad=True)}, "log_decay must not require a gradient"),
    ({"scale": float("inf")}, "scale must be finite, got inf"),
    ({"initial_state": torch.zeros(2, 1, 8)}, "initial_state must be \\(documents, Hkv, D, Dv\\), got \\(2, 1, 8\\)"),
    ({"initial_state": torch.zeros(3, 1, 8, 8)}, "initial_state must be \\(2, 1, 1, 8, 8\\)"),
    ({"initial_state": torch.zeros(2, 1, 8, 8).half()}, "initial_state must be .* of torch.float32 on cpu, got"),
    ({"backend": "flash_attn"}, r"backend must be one of \['aten', 'reference', 'triton'\], got 'flash_attn'"),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_refusals_name_the_argument_and_send_nothing(change, message):
    comm = Comm("silent", 0, 2)  # whose exchange would fail: it has no group
    change = dict(change)
    lin = LASP2Attention(comm, transport=change.pop("transport", "all_gather"))
    call = {"q": (12, 2, 8), "k": (12, 1, 8), "v": (12, 1, 8), "layout": LAYOUT}
    assert lin.unsupported(**{name: torch.zeros(x) if name in "qkv" else x for name, x in call.items()}) is None
    with use_backend(change.pop("backend", "aten")):
        call |= change
        call |= {name: torch.zeros(call[name]) for name in "qkv" if isinstance(call[name], tuple)}
        with pytest.raises(ValueError, match=message):
            lin(**call)
        assert lin.unsupported(**call) is not None
    assert comm.sent_messages == 0


def test_modules_are_checked():
    comm = Comm("silent", 0, 2)
    with pytest.raises(ValueError, match="transport must be one of all_gather, scan, got 'ring'"):
        LASP2Attention(comm, transport="ring")
    with pytest.raises(ValueError, match="blocks must be at least 1, got 0"):
        LASP2Attention(comm, transport="scan", blocks=0)
    with pytest.raises(ValueError, match="group must be a process group"):
        LASP2Attention(None)
    mesh = Comm("mesh", 0, 4)
    mesh.shape = (2, 2)
    with pytest.raises(ValueError, match="group must have 1 dimension"):
        LASP2Attention(mesh)


def disagreeing(group, change):
    """A call in which rank 1 differs; the error, as all ranks should see it."""
    lin = LASP2Attention(group, check_ranks=True)
    rank = lin.engine.comm.rank
    q, k, v = (LAYOUT.shard(x, rank) for x in LinearCase(LAYOUT).inputs()[:3])
    call = {"log_decay": torch.tensor([-0.1, -0.2])} | (change if rank == 1 else {})
    try:
        lin(q, k, v, LAYOUT, **call)
    except ValueError as error:
        lin(q, k, v, LAYOUT)  # the group still works
        return str(error)
    return None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_decay": None}, "log_decay must be the same on all ranks: rank 0 has \\[-0.1"),
        ({"return_state": True}, "return_state must be the same on all ranks: rank 0 has False, rank 1 has True"),
        ({"scale": float("nan")}, "scale must be finite, got nan \\(rank 1 of 2\\)"),
    ],
)
def test_ranks_that_disagree_all_raise_the_same_error(pool, change, message):
    first, second = pool(2, disagreeing, change)
    assert first == second
    assert re.search(message, first)


def compiled(group):
    torch._dynamo.reset()
    lin, decay = LASP2Attention(group), torch.tensor([-0.1, -0.2])
    comm = lin.engine.comm

    def step(q, k, v, layout):
        out, state = lin(q.sin(), k, v, layout, log_decay=decay, return_state=True)
        return out.cos().sum() + state.cos().sum()

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fast, counts, worst = torch.compile(step, backend=counter, fullgraph=True), [], 0.0
    for tokens in (40, 56, 72, 104):
        layout, results = Layout.zigzag([0, tokens // 3, tokens // 2, tokens], comm.size), []
        for function in (fast, step):
            q, k, v = (layout.shard(x, comm.rank).requires_grad_() for x in LinearCase(layout).inputs()[:3])
            loss = function(q, k, v, layout)
            results.append([loss.detach(), *torch.autograd.grad(loss, (q, k, v))])
        worst = max(worst, *(float((x - y).abs().max()) for x, y in zip(*results, strict=True)))
        counts.append(counter.frame_count)
    return worst, counts


@pytest.mark.filterwarnings("ignore")
def test_compiles_whole_and_not_again_for_the_next_batch(pool):
    for worst, counts in pool(2, compiled):
        assert worst <= 1e-12
        assert counts[0] == 1 and counts[1] == counts[-1] <= 2  # once, and once more with dynamic shapes


@pytest.mark.parametrize("begun", [False, True])
def test_operators_pass_opcheck(begun):
    lin, case = LASP2Attention(Comm("one", 0, 1)), LinearCase(Layout.zigzag([0, 5, 12], 1), begun=begun)
    q, k, v, _, initial, _ = case.inputs()
    arguments = lin._arguments(q, k, v, case.layout, True, case.log_decay, 1.0, initial, True)
    tensors = [x if x is None else x.detach().requires_grad_(i != 3) for i, x in enumerate(arguments[:5])]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.seqpar.linear_attention, (*tensors, *arguments[5:]), test_utils=tests)


def test_autocast_and_checkpointing():
    layout = Layout.contiguous([0, 40, 90], 1)
    comm = Comm("one", 0, 1)
    lin = LASP2Attention(comm)
    q, k, v = (t.float().requires_grad_() for t in LinearCase(layout).inputs()[:3])
    with torch.autocast("cpu", torch.bfloat16):
        assert lin(q, k, v, layout).dtype == torch.bfloat16
    plain = lin(q.sin(), k, v, layout).square().sum()
    kept = seqpar.checkpoint(lambda q: lin(q.sin(), k, v, layout), q).square().sum()
    with seqpar.trace() as trace:
        gradients = [torch.autograd.grad(loss, (q, k, v)) for loss in (plain, kept)]
    assert {event.what for event in trace.events} == {"lasp2 backward"}  # and no forward again
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_in_one_piece_or_in_steps():
    """With and without `local`, and in blocks of one chunk: the same numbers, of each backend."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, 133, h, 6, generator=generator, dtype=torch.float64) for h in (4, 2, 2, 4))
    decay = torch.tensor([-0.05, -2.0], dtype=torch.float64)
    spans = Spans(np.array([0, 5, 40, 40, 133]), np.array([0, -1, 1, 2]), np.array([-1, 0, 1, 2]))
    initial, dfinal = torch.randn(2, 3, 2, 2, 6, 6, generator=generator, dtype=torch.float64)
    results = []
    for backend, chunk, in_steps in itertools.product(("reference", "aten"), (16, 128), (True, False)):
        aten.CHUNK = chunk
        recurrence = Recurrence(0.7, True, backend, decay)
        works = forward(q, k, v, spans, recurrence), backward(q, k, v, dout, spans, recurrence, initial)
        for work in works if in_steps else ():
            work.local()
        results.append([works[0].states, works[0].finish(initial), works[1].states, *works[1].finish(dfinal)])
    for result in results[1:]:
        for x, y in zip(result, results[0], strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("causal", [True, False])
def test_the_triton_backend_on_ranks(pool, causal):
    """On a CPU, in Triton's interpreter, which is not for threads."""
    case = LinearCase(Layout.zigzag([0, 70, 100], 2), causal=causal, decay=0.1 if causal else None, begun=True, returned=True,
                      dtype=torch.float32, backend="triton", batch=1)  # fmt: skip
    expected = oracle(case)
    for got in pool(2, run, case):
        assert_right(got, expected, case.dtype)
