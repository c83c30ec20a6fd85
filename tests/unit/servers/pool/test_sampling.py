"""A sample of rows tells right results from wrong ones, and a pool then uses the server no more."""

import dataclasses

import pytest
import torch

from seqpar.servers.pool.sampling import is_right
from seqpar.servers.server import worker
from tests.support.requests import CASES, backward, forward, random_request
from tests.support.servers import compute, connect, expected, running, same, wait_until

REQUESTS = [random_request(i, 40, 50) for i in range(6)]


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


def test_results_of_another_dtype_of_options_are_compared():
    request = random_request(0, dtype=torch.float16)
    request = dataclasses.replace(request, exact_out=True)
    results = expected(request)
    assert is_right(request, results, 5, 1) and results[0].dtype == torch.float32
