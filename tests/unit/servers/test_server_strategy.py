"""Attention on servers, in threads of this process: the oracle's, and always the same bits."""

import concurrent.futures
import contextlib
import copy
import dataclasses
import itertools
import pickle
import threading

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import DisaggregatedAttention, Layout, ServersError, make_attention, use_backend
from seqpar.servers.server import worker
from seqpar.servers.server.compute import compute
from seqpar.servers.transport.one_sided import available
from seqpar.softmax.tasks import split
from tests.support.cases import assert_right, oracle
from tests.support.served import CASES, CUT, backward, begin, call
from tests.support.servers import Gate, Slow, connect, running, wait_until

TRANSPORTS = [
    ("grpc",),
    pytest.param(("nixl", "grpc"), marks=pytest.mark.skipif(not available(), reason="needs nixl")),
]
BITS = dataclasses.replace(CASES["fp32"], sinks=True, dlse=True)
NOWHERE = {"connect": 0.05, "request": 0.1, "hedge": 0.2, "give_up": 0.3}


def same(results, others):
    """Whether two calls have the same bits."""
    return all(np.array_equal(x, y) for x, y in zip(results, others, strict=True))


def tasks(pool):
    """How many tasks each server computed, and home."""
    return [x.tasks for x in pool.report().servers]


@contextlib.contextmanager
def pool_of(folder, count, **options):
    """A pool of so many servers in threads, all of them ready."""
    addresses = [f"ipc://{folder}/{i}" for i in range(count)]
    transports = options.pop("transports", ("grpc",))
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(running(address, transports=list(transports)))
            for address in addresses
        ]
        options = {"transports": transports, "home": False} | options
        pool = stack.enter_context(connect(*addresses or [f"ipc://{folder}/none"], **options))
        wait_until(lambda: [x.state for x in pool.report().servers[:count]] == ["ready"] * count)
        pool.servers = servers
        yield pool


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """A pool of two servers, which all tests that do not harm it share."""
    with pool_of(tmp_path_factory.mktemp("servers"), 2) as pool:
        yield pool


@pytest.mark.parametrize("transports", TRANSPORTS)
def test_equals_the_oracle(tmp_path, transports):
    with pool_of(tmp_path, 2, transports=transports) as pool:
        for case in CASES.values():
            assert_right(call(pool, case), oracle(case), case.dtype)
        assert {x.transport for x in pool.report().servers[:-1]} == {transports[0]}
        assert tasks(pool)[-1] == 0 and sum(tasks(pool)) > 4 * len(CASES)


def test_one_task_equals_the_oracle(pool):
    for case in CASES.values():
        assert_right(call(pool, case, tasks=1), oracle(case), case.dtype)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_bits_do_not_depend_on_the_servers(pool, tmp_path, count):
    expected = call(pool, BITS)
    with pool_of(tmp_path, count, home=not count, deadlines={"connect": 0.5}) as other:
        for _ in range(2):
            assert same(call(other, BITS), expected)
        *computed, at_home = tasks(other)
        assert all(computed[:count])
        assert bool(count) != bool(at_home)


def test_bits_depend_on_neither_faults_nor_hedges(pool, tmp_path, monkeypatch):
    expected, count = call(pool, BITS), itertools.count()

    def now_and_then(requests, device):
        if next(count) % 3 == 1:
            raise RuntimeError("now and then")
        return compute(requests, device)

    monkeypatch.setattr(worker, "compute", now_and_then)
    with pool_of(tmp_path, 2) as other:
        assert all(same(call(other, BITS), expected) for _ in range(4))
        assert other.report().retried


def test_a_hanging_server_does_not_change_bits(pool, tmp_path, monkeypatch):
    expected, slow = call(pool, BITS), Slow(monkeypatch, 1.0)
    with pool_of(tmp_path, 2, deadlines={"connect": 0.2, "request": 0.3}) as other:
        slow.threads = other.servers[0].threads
        assert same(call(other, BITS), expected)
        assert other.report().retried


def test_a_lying_server_does_not_change_bits(pool, tmp_path, monkeypatch):
    expected = call(pool, BITS)

    def wrong(requests, device):
        results = compute(requests, device)
        if threading.current_thread() in other.servers[0].threads:
            return [[x + 1 for x in result] for result in results]
        return results

    monkeypatch.setattr(worker, "compute", wrong)
    with pool_of(tmp_path, 2, sample=2) as other:
        assert all(same(call(other, BITS), expected) for _ in range(2))
        assert [x.state for x in other.report().servers[:2]] == ["refused", "ready"]


def test_what_servers_compute_passes_the_check_of_samples(tmp_path):
    with pool_of(tmp_path, 1, sample=2) as other:
        for case in CASES.values():
            assert_right(call(other, case), oracle(case), case.dtype)
        assert other.report().servers[0].state == "ready" and not other.report().retried


def test_backward_may_use_other_servers_than_forward(pool, tmp_path):
    expected = call(pool, BITS)
    addresses = [f"ipc://{tmp_path}/{i}" for i in range(2)]
    with connect(*addresses, deadlines={"connect": 0.1}, home=False) as other:
        with running(addresses[0]):
            wait_until(lambda: other.report().servers[0].state == "ready")
            begun = begin(other, BITS)
        wait_until(lambda: other.report().servers[0].state == "connecting")
        with running(addresses[1]):
            wait_until(lambda: other.report().servers[1].state == "ready")
            assert same(backward(*begun), expected)
        assert all(tasks(other)[:2]) and not tasks(other)[2]


def test_three_trainers_at_once_on_two_servers(pool, tmp_path):
    names = ["causal", "prefix", "bf16"]
    expected = [call(pool, CASES[name]) for name in names]
    addresses = [server.address for server in pool.servers]

    def train(name):
        with connect(*addresses, home=False) as own:
            return [call(own, CASES[name]) for _ in range(4)]

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        for results, right in zip(threads.map(train, names), expected, strict=True):
            assert all(same(result, right) for result in results)


def test_several_threads_may_share_a_pool(pool):
    expected = call(pool, BITS)
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        for results in threads.map(lambda _: call(pool, BITS), range(6)):
            assert same(results, expected)


def test_calls_in_two_parts(pool):
    attn = make_attention("disaggregated", pool, **CUT)
    layout = Layout.contiguous([0, 30, 40], 1)
    inputs = [torch.randn(3, 40, 2, 8).requires_grad_() for _ in range(2)]
    begun = [attn.begin(*x.unbind(), layout, causal=True) for x in inputs]
    outs = [attn.finish(x) for x in begun]
    sum(out.square().sum() for out in outs).backward()
    for x, out in zip(inputs, outs, strict=True):
        again = x.detach().requires_grad_()
        expected = attn(*again.unbind(), layout, causal=True)
        expected.square().sum().backward()
        assert torch.equal(out, expected) and torch.equal(x.grad, again.grad)


def test_checkpoints_recompute_on_servers(pool):
    attn, layout = DisaggregatedAttention(pool, **CUT), Layout.contiguous(40, 1)
    x = torch.randn(3, 40, 2, 8).requires_grad_()
    before = sum(tasks(pool))
    call = lambda x: attn(*x.unbind(), layout, causal=True).square().sum()  # noqa: E731
    checkpoint(call, x, use_reentrant=False).backward()
    computed = sum(tasks(pool)) - before
    again = x.detach().requires_grad_()
    call(again).backward()
    assert torch.equal(x.grad, again.grad)
    assert computed * 2 == 3 * (sum(tasks(pool)) - before - computed)


def test_begun_calls_that_are_dropped_leave_nothing(pool):
    attn, layout = DisaggregatedAttention(pool, **CUT), Layout.contiguous(40, 1)
    x = torch.randn(3, 40, 2, 8).requires_grad_()
    begin = lambda x: attn.begin(*x.unbind(), layout, causal=True)  # noqa: E731
    begin(x)
    assert not split._posted
    attn.finish(checkpoint(begin, x, use_reentrant=False)).square().sum().backward()
    assert not split._posted
    again = x.detach().requires_grad_()
    attn.finish(begin(again)).square().sum().backward()
    assert torch.equal(x.grad, again.grad)


def test_checkpoints_may_contain_half_a_call(pool):
    attn, layout = DisaggregatedAttention(pool, **CUT), Layout.contiguous(40, 1)
    begin = lambda x: attn.begin(*x.unbind(), layout, causal=True)  # noqa: E731
    x = torch.randn(3, 40, 2, 8).requires_grad_()
    again = x.detach().requires_grad_()
    out = seqpar.checkpoint(attn.finish, seqpar.checkpoint(begin, x))
    out.square().sum().backward()
    attn.finish(begin(again)).square().sum().backward()
    assert torch.equal(x.grad, again.grad) and not split._posted


@pytest.mark.exhaustive
def test_compiles_without_a_break(pool):
    attn = DisaggregatedAttention(pool, **CUT)
    step = lambda x, layout: attn(*x.unbind(), layout, causal=True).square().sum()  # noqa: E731
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for tokens in (40, 56):
        layout = Layout.contiguous([0, 11, tokens], 1)
        x = torch.randn(3, tokens, 2, 8).requires_grad_()
        again = x.detach().requires_grad_()
        compiled(x, layout).backward()
        step(again, layout).backward()
        assert torch.equal(x.grad, again.grad)


def test_nothing_to_see_needs_no_server(tmp_path):
    with connect(f"ipc://{tmp_path}/0", home=False, deadlines=NOWHERE) as pool:
        attn = DisaggregatedAttention(pool, **CUT)
        for shape, layout, options in (
            ((0, 2, 8), Layout.contiguous(0, 1), {}),
            ((0, 5, 2, 8), Layout.contiguous(5, 1), {}),
            ((5, 2, 8), Layout.contiguous([0, 5, 5], 1), {"kv": [0, 0, 3]}),
        ):
            kv_layout = Layout.contiguous(options["kv"], 1) if options else layout
            q = torch.randn(shape).requires_grad_()
            k = torch.randn(*shape[:-3], kv_layout.tokens, 2, 8).requires_grad_()
            out, lse = attn(q, k, k, layout, kv_layout=kv_layout, causal=True, return_lse=True)
            out.sum().backward()
            assert not out.any() and lse.isneginf().all()
            assert not q.grad.any() and not k.grad.any()


REFUSED = {  # arguments of the module, of the call, and what the error says
    "a layout of several ranks": ({}, {"layout": Layout.contiguous(40, 2)}, "layout must be for"),
    "many heads": ({}, {"heads": 1025, "dim": 1}, "q must have at most 1024 heads"),
    "a large head dim": ({}, {"dim": 1025}, "q must have a head dim of at most 1024"),
    "a large value dim": ({}, {"value_dim": 1025}, "v must have a head dim of at most 1024"),
    "max logits": ({}, {"return_max_logits": True}, "return_max_logits must be False: servers"),
    "slopes": ({}, {"alibi_slopes": torch.ones(2)}, "alibi_slopes must be None: servers do not"),
    "dropout": ({}, {"dropout_p": 0.5}, "dropout_p must be 0"),
    "a softcap below 0": ({}, {"softcap": -1.0}, "softcap must be finite"),
    "keys of other documents": ({}, {"kv_layout": Layout.contiguous([0, 1, 40], 1)}, "kv_layout"),
}


@pytest.mark.composes(
    "PyTorch",
    "a trainer holds whole documents, in a layout of one rank: use data parallelism, or "
    "`DisaggregatedAttention(group)` without servers",
    case="a layout of several ranks",
    context=2,
    servers=2,
    refused="layout must be for",
)
@pytest.mark.parametrize("name", REFUSED)
def test_inexact_calls_are_refused_before_sending(pool, name):
    options, changes, said = REFUSED[name]
    attn, before = DisaggregatedAttention(pool, **CUT, **options), sum(tasks(pool))
    heads, dim = changes.pop("heads", 2), changes.pop("dim", 8)
    v = torch.zeros(40, heads, changes.pop("value_dim", 8))
    q = torch.zeros(40, heads, dim)
    arguments = {"layout": Layout.contiguous(40, 1), "causal": True} | changes
    sent = attn.sent_bytes
    assert said in attn.unsupported(q, q, v, **arguments)
    with pytest.raises(ValueError, match=said):
        attn(q, q, v, **arguments)
    assert attn.sent_bytes == sent and sum(tasks(pool)) == before


def test_a_backend_is_the_servers_choice(pool):
    attn, q = DisaggregatedAttention(pool), torch.zeros(4, 1, 8)
    with use_backend("reference"), pytest.raises(ValueError, match="each server chooses its"):
        attn(q, q, q, Layout.contiguous(4, 1), causal=True)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"tasks": 0}, ValueError, "tasks must be at least 1"),
        ({"tasks": 2.5}, ValueError, "tasks must be"),
        ({"tile": "x"}, ValueError, "tile must be"),
        ({"plan": None}, TypeError, "plan is not an option of 'disaggregated', which has tasks"),
        ({"pool": None}, TypeError, "pool is not an option"),
        ({"routing": seqpar.Routing(1)}, ValueError, "routing must be None"),
    ],
)
def test_wrong_options_are_refused(pool, options, error, said):
    with pytest.raises(error, match=said):
        make_attention("disaggregated", pool, **options)


def test_other_strategies_take_no_pool(pool):
    with pytest.raises(ValueError, match="group must be a process group"):
        seqpar.RingAttention(pool)


def test_a_pool_that_is_closed_says_so(tmp_path):
    with pool_of(tmp_path, 1) as pool:
        begun = begin(pool, BITS)
    with pytest.raises(ServersError, match="the pool was closed"):
        begin(pool, BITS)
    with pytest.raises(ServersError, match="the pool was closed"):
        backward(*begun)


def test_without_servers_a_call_raises_and_cleans_up(tmp_path):
    with connect(f"ipc://{tmp_path}/0", home=False, deadlines=NOWHERE) as pool:
        said = f"no server was ready .ipc://{tmp_path}/0 is connecting: "
        with pytest.raises(ServersError, match=said):
            begin(pool, BITS)
        wait_until(lambda: not pool.report().waiting)


def test_closing_ends_a_call_that_waits(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    with pool_of(tmp_path, 1) as pool, concurrent.futures.ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(begin, pool, BITS)
        assert gate.begun.wait(10)
        pool.close()
        with pytest.raises(ServersError, match="the pool was closed"):
            waiting.result(10)
        gate.open.set()


def test_what_a_call_sends_is_what_it_says(pool):
    case = CASES["cross"]
    attn = DisaggregatedAttention(pool, **CUT)
    q, k, v = (x.requires_grad_() for x in case.inputs()[:3])
    arguments = {"causal": True, "kv_layout": case.kv_layout, "return_lse": True}
    said, before = attn.traffic(q, k, v, case.layout, **arguments), attn.sent_bytes
    assert {row.peer for row in said} == {-1}
    out, lse = attn(q, k, v, case.layout, **arguments)
    forward = attn.sent_bytes - before
    (out.sum() + lse.nan_to_num(0, 0, 0).sum()).backward()
    sent = forward, attn.sent_bytes - before - forward
    for direction, nbytes in zip(("forward", "backward"), sent, strict=True):
        assert sum(row.bytes for row in said if row.direction == direction) == nbytes


def test_how_it_is_shown_copied_and_pickled(pool):
    attn = DisaggregatedAttention(pool, tasks=3)
    assert repr(attn) == f"DisaggregatedAttention({pool}, tasks=3, tile=128)"
    assert copy.deepcopy(torch.nn.Sequential(attn))[0]._key == attn._key
    for thing, said in ((attn, "attention on it cannot be pickled"), (pool, "connect in the")):
        with pytest.raises(TypeError, match=said):
            pickle.dumps(thing)
    layout, x = Layout.contiguous([0, 10, 40], 1), torch.zeros(40, 2, 8)
    area = DisaggregatedAttention(pool, **CUT).mask_area(x, x, x, layout, causal=True)
    assert area.sum() == 2 * (55 + 465) and area.shape[0] == 1 < area.shape[1]
