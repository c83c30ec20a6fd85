"""Decoding, token by token: the parallel form's numbers, and what is refused."""

import pytest
import torch

from seqpar import LASP2Attention, Layout
from tests.support.linear_cases import LinearCase, assert_right, oracle


def test_decoding_steps_are_the_parallel_form():
    case = LinearCase(Layout.contiguous([0, 20, 40, 60], 1), returned=True)
    expected = oracle(case)
    q, k, v = (x.unflatten(0, (3, 20)) for x in case.inputs()[:3])
    state, outs = torch.zeros(3, case.kv_heads, case.dim, case.value_dim, dtype=torch.float64), []
    for i in range(20):
        out, state = LASP2Attention.step(
            q[:, i], k[:, i], v[:, i], state, case.log_decay, case.scale
        )
        outs.append(out)
    assert_right(
        {"out": torch.stack(outs, 1).flatten(0, 1).numpy()}, {"out": expected["out"]}, torch.float64
    )
    assert_right({"state": state.numpy()}, {"state": expected["state"]}, torch.float64)


def arguments():
    shapes = {"q": (3, 4, 8), "k": (3, 2, 8), "v": (3, 2, 6), "state": (3, 2, 8, 6)}
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


REFUSALS = [
    ({"q": torch.zeros(3, 8)}, r"q must be \(N, Hq, D\), got \(3, 8\)"),
    ({"q": [0.0]}, "q must be a tensor, got list"),
    ({"q": torch.zeros(3, 4, 0)}, r"q must be \(N, Hq, D\), got \(3, 4, 0\)"),
    ({"q": torch.zeros(3, 4, 8).long()}, "q must be of one of the dtypes .*, got torch.int64"),
    ({"q": torch.zeros(3, 3, 8)}, r"k must be \(3, Hkv, 8\), .* divides q's 3, got"),
    ({"k": torch.zeros(1, 2, 8)}, r"k must be \(3, Hkv, 8\), .* got \(1, 2, 8\)"),
    ({"k": torch.zeros(3, 2, 1)}, r"k must be \(3, Hkv, 8\), .* got \(3, 2, 1\)"),
    ({"k": torch.zeros(3, 0, 8)}, r"k must be \(3, Hkv, 8\), .* got \(3, 0, 8\)"),
    ({"k": torch.zeros(3, 2, 8).half()}, "k must be of q's dtype, .* got torch.float16: cast"),
    ({"k": torch.zeros(3, 2, 8, device="meta")}, "k must be on q's device, cpu, got meta"),
    ({"v": torch.zeros(3, 1, 6)}, r"v must be \(3, 2, Dv\), got \(3, 1, 6\)"),
    ({"v": torch.zeros(1, 2, 6)}, r"v must be \(3, 2, Dv\), got \(1, 2, 6\)"),
    ({"v": torch.zeros(3, 2, 6).double()}, "v must be of q's dtype, .* got torch.float64: cast"),
    ({"v": torch.zeros(3, 2, 6, device="meta")}, "v must be on q's device, cpu, got meta"),
    ({"state": torch.zeros(1, 2, 8, 6)}, r"state must be \(3, 2, 8, 6\) \(N, Hkv, D, Dv\) of"),
    ({"state": torch.zeros(3, 2, 6, 8)}, r"state must be .* got \(3, 2, 6, 8\)"),
    ({"state": torch.zeros(3, 2, 8, 6).half()}, "state must be .* got .* of torch.float16"),
    ({"state": torch.zeros(3, 2, 8, 6, device="meta")}, "state must be on q's device, cpu"),
    ({"state": None}, "state must be a tensor, got NoneType"),
    ({"log_decay": -0.1}, "log_decay must be a tensor, got float"),
    ({"log_decay": torch.zeros(4)}, r"log_decay must be \(2,\), one per KV head, .* got \(4,\)"),
    ({"log_decay": torch.zeros(2).half()}, r"log_decay must be .* got \(2,\) of torch.float16"),
    ({"log_decay": torch.zeros(2, device="meta")}, "log_decay must be on q's device, cpu"),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_refusals_name_the_argument(change, message):
    out, state = LASP2Attention.step(**arguments())
    assert out.shape == (3, 4, 6) and state.shape == (3, 2, 8, 6)
    with pytest.raises(ValueError, match=message):
        LASP2Attention.step(**arguments() | change)


def test_no_document_is_fine():
    out, state = LASP2Attention.step(**{name: x[:0] for name, x in arguments().items()})
    assert out.shape == (0, 4, 6) and state.shape == (0, 2, 8, 6)


def test_autocast_does_not_change_a_step():
    """States are fp32, and a product of them in bf16 would keep 8 of their bits."""
    call = {name: torch.randn(x.shape) for name, x in arguments().items()}
    expected = LASP2Attention.step(**call)
    with torch.autocast("cpu", torch.bfloat16):
        found = LASP2Attention.step(**call)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
