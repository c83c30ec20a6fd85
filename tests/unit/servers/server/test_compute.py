"""That requests have the answers of the oracle, alone and fused, with the same bits in both."""

import dataclasses

import pytest
import torch

from seqpar.servers.server.compute import compute, kind_of
from seqpar.servers.wire.request import Request
from tests.support.cases import assert_right, oracle
from tests.support.requests import CASES, backward, forward, packed, random_request
from tests.support.tiers import few_rows

CPU = torch.device("cpu")


def alone(request):
    return compute([request], CPU)[0]


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward_are_right(name):
    case = CASES[name]
    out, lse = alone(forward(case))
    gradients = alone(backward(case, out, lse))
    assert_right(packed(case, [out, lse, *gradients]), oracle(case), case.dtype)


@few_rows()
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["default", "reference"])
def test_fused_requests_keep_their_bits(name, backend):
    cases = [dataclasses.replace(CASES[name], seed=seed) for seed in range(3)]
    requests = [forward(case, backend=backend) for case in cases]
    assert len({kind_of(x, CPU) for x in requests}) == 1
    results = [alone(x) for x in requests]
    assert_same(compute(requests, CPU), results)
    behind = [backward(case, *result) for case, result in zip(cases, results, strict=True)]
    assert len({kind_of(x, CPU) for x in behind}) == 1
    assert_same(compute(behind, CPU), [alone(x) for x in behind])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_requests_of_other_lengths_are_fused_too(dtype):
    lengths = [(33, 64), (1, 1), (128, 128), (0, 0), (7, 700), (0, 5)]
    requests = [random_request(i, *rows, dtype=dtype) for i, rows in enumerate(lengths)]
    for some in (requests, requests[::-1]):
        assert_same(compute(some, CPU), [alone(x) for x in some])


@pytest.mark.parametrize("rows", [(64, 64), (63, 65)])
def test_memory_addresses_do_not_change_bits(rows):
    request = random_request(0, *rows)
    results, copied = alone(request), dataclasses.replace(request)
    for offset in (1, 7, 16):
        for name in ("q", "k", "v"):
            x = getattr(request, name)
            moved = torch.empty(x.numel() + offset)[offset:].view(x.shape).copy_(x)
            copied = dataclasses.replace(copied, **{name: moved})
        before = [x.clone() for x in copied.tensors()]
        assert_same([alone(copied)], [results])
        assert all(map(torch.equal, copied.tensors(), before))


def test_nan_stays_in_its_request():
    sane, mad = random_request(0), random_request(1)
    expected = alone(sane)
    mad.q[:], mad.k[:], mad.v[:] = torch.nan, torch.inf, -torch.inf
    for fused in ([mad, sane], [sane, mad]):
        results = compute(fused, CPU)
        assert_same([results[fused.index(sane)]], [expected])


def test_kinds_separate_requests_that_cannot_be_fused():
    request = random_request(0)
    others = [
        random_request(0, heads=4),
        random_request(0, dim=4),
        random_request(0, dtype=torch.float64),
        dataclasses.replace(request, exact_out=True),
        dataclasses.replace(request, options=request.options._replace(scale=0.5)),
        dataclasses.replace(request, options=request.options._replace(softcap=3.0)),
    ]
    kinds = {kind_of(x, CPU) for x in (request, *others)}
    assert len(kinds) == 1 + len(others) and kind_of(random_request(7, 9, 9), CPU) in kinds


def test_exact_out_is_the_partial():
    case = CASES["bf16"]
    out, _ = alone(forward(case, exact_out=True))
    assert out.dtype == torch.float32
    assert torch.equal(out.bfloat16(), alone(forward(case))[0])


@pytest.mark.parametrize(("change", "named"), [
    ({"q": torch.zeros(1, 48, 2)}, "q must be"),
    ({"q": torch.zeros(1, 48, 3, 8), "k": torch.zeros(1, 64, 2, 8)}, "k must have"),
    ({"k": torch.zeros(1, 64, 2, 9)}, "k must have"),
    ({"k": torch.zeros(1, 63, 2, 8)}, "v must have"),
    ({"v": torch.zeros(1, 64, 1, 8)}, "v must have"),
    ({"v": torch.zeros(1, 64, 2, 8, dtype=torch.float64)}, "one dtype"),
    ({"q": torch.zeros(1, 47, 2, 8)}, "slices must have"),
    ({"q": "q"}, "q must be a tensor"),
])  # fmt: skip
def test_a_request_that_makes_no_sense_is_refused(change, named):
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(random_request(0), **change)


def test_a_gradient_of_another_shape_is_refused():
    request = random_request(0)
    out, lse = alone(request)
    output = backward(CASES["fp32"], *alone(forward(CASES["fp32"]))).output
    with pytest.raises(ValueError, match=r"output\.dout must be"):
        dataclasses.replace(request, output=output)
    assert isinstance(request, Request) and out.shape == request.q.shape and lse.dim() == 3


def assert_same(results, expected):
    for got, wanted in zip(results, expected, strict=True):
        for x, y in zip(got, wanted, strict=True):
            assert x.dtype == y.dtype and torch.equal(x, y)


@pytest.mark.parametrize("backend", ["aten", "triton"])
def test_forwards_whose_bits_depend_on_others_are_alone(backend):
    """On a GPU. A backward of them may share a call."""
    case = next(iter(CASES.values()))
    requests = [forward(case, backend=backend) for _ in range(2)]
    assert len({kind_of(x, torch.device("cuda")) for x in requests}) == 2
    behind = [backward(case, x.q, x.q[..., 0]) for x in requests]
    behind = [dataclasses.replace(x, options=x.options._replace(backend=backend)) for x in behind]
    assert len({kind_of(x, torch.device("cuda")) for x in behind}) == 1
