"""A sample of rows tells right results from wrong ones, and a pool then uses the server no more."""

import dataclasses
import threading

import pytest
import torch

from seqpar import Layout
from seqpar.servers.pool import local_worker
from seqpar.servers.pool.sampling import is_right
from seqpar.servers.server import worker
from tests.support.cases import Case
from tests.support.requests import CASES, backward, forward, random_request
from tests.support.servers import compute, connect, expected, running, same, wait_until
from tests.support.tiers import few_rows

REQUESTS = [random_request(i, 40, 50) for i in range(6)]


@few_rows(pairs=False)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_right_results_are_right(name, rows):
    case = CASES[name]
    for request in (forward(case), forward(case, exact_out=True)):
        results = expected(request)
        assert all(is_right(request, results, rows, seed) for seed in range(5))
    request = backward(case, *expected(forward(case)))
    assert all(is_right(request, expected(request), rows, seed) for seed in range(5))


@pytest.mark.parametrize("name", ["fp32", "bf16", "causal"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_wrong_results_are_wrong(name, direction):
    case = CASES[name]
    request = forward(case)
    if direction == "backward":
        request = backward(case, *expected(request))
    for i in range(2 if direction == "forward" else 3):
        for change in (lambda x: 1.5 * x, torch.zeros_like, lambda x: x * torch.nan, lambda x: -x):
            results = expected(request)
            results[i] = change(results[i])
            assert not is_right(request, results, 1000, 0), i


def test_what_is_not_finite_may_be_right():
    request = random_request(0)
    request.v[:, 3] = torch.inf
    results = expected(request)
    assert results[0].isinf().any() and is_right(request, results, 1000, 0)
    results[0][results[0].isinf()] = torch.nan
    assert not is_right(request, results, 1000, 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_that_cancel_are_right(dtype):
    layout = Layout.contiguous([0, 1, 2, 3, 5, 7, 9, 12, 32], 1)
    for heads in (1, 2):
        case = Case("ring", layout, causal=True, heads=heads, kv_heads=1, dim=128, dtype=dtype)
        request = forward(case)
        request = backward(case, *expected(request))
        results = expected(request)
        assert all(is_right(request, results, 1, seed) for seed in range(60))
        results[0] = 1.1 * results[0]
        assert not is_right(request, results, 1000, 0)


def test_scores_that_cancel_are_right():
    layout = Layout.contiguous([0, 1, 2, 3, 4], 1)
    case = Case("ring", layout, causal=True, heads=1, kv_heads=1, dim=128, dtype=torch.float32)
    request = forward(case)
    request.k[..., 0] -= (request.q * request.k).sum(-1) / request.q[..., 0]
    again = expected(dataclasses.replace(request, q=request.q.flip(-1), k=request.k.flip(-1)))
    assert all(is_right(request, again, 1, seed) for seed in range(8))


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_backwards_of_infinite_inputs_count_as_right(value):
    case = CASES["fp32"]
    request = backward(case, *expected(forward(case)))
    request.output.dout[:, 70, 0, 0] = value
    request.output.ensure_delta()[:, 70] = value
    results = expected(request)
    results[0][:, :30] = torch.nan  # the tile of another kernel
    assert is_right(request, results, 1000, 0)


def test_a_request_of_no_rows_is_right():
    for rows in ((0, 0), (0, 5), (5, 0)):
        request = random_request(0, *rows)
        assert is_right(request, expected(request), 3, 0)


def test_a_server_with_wrong_replies_is_dropped(tmp_path, monkeypatch):
    with running(f"ipc://{tmp_path}/0") as wrong, running(f"ipc://{tmp_path}/1") as right:

        def answer(requests, device):
            results = compute(requests, device)
            if worker.threading.current_thread() in wrong.threads:
                results = [[torch.zeros_like(x) for x in tensors] for tensors in results]
            return results

        monkeypatch.setattr(worker, "compute", answer)
        with connect(wrong.address, right.address, sample=2, home=False) as pool:
            wait_until(lambda: [x.state for x in pool.report().servers[:2]] == ["ready"] * 2)
            futures = [pool.submit(request) for request in REQUESTS]
            assert all(same(x.result(20), r) for x, r in zip(futures, REQUESTS, strict=True))
            first, second, home = pool.report().servers
            assert (first.state, first.reason) == ("refused", "its answer was wrong")
            assert (first.tasks, second.tasks, home.tasks) == (0, len(REQUESTS), 0)
            assert same(pool.submit(REQUESTS[0]).result(20), REQUESTS[0])
        with connect(wrong.address, sample=2) as pool:
            assert same(pool.submit(REQUESTS[0]).result(20), REQUESTS[0])
            assert pool.report().servers[1].tasks == 1


def test_settled_tasks_blame_no_server(tmp_path, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def examine(*arguments):
        begun.set()
        go_on.wait(20)
        return is_right(*arguments)

    monkeypatch.setattr(local_worker, "is_right", examine)
    request = random_request(0)
    with running(f"ipc://{tmp_path}/0") as server, connect(server.address, sample=4) as pool:
        future = pool.submit(request)
        assert begun.wait(20)
        future.cancel()
        request.q.zero_()  # the future is done, so the caller may change its tensors
        go_on.set()
        wait_until(lambda: pool.report().wasted)
        assert pool.report().servers[0].state == "ready"


def test_results_of_another_dtype_of_options_are_compared():
    request = random_request(0, dtype=torch.float16)
    request = dataclasses.replace(request, exact_out=True)
    results = expected(request)
    assert is_right(request, results, 5, 1) and results[0].dtype == torch.float32
