"""Decoding by the recurrent kinds, by one or a few tokens: the parallel form, and refusals."""

import dataclasses

import pytest
import torch

from seqpar.linear.decode import decode_step
from seqpar.linear.inputs import Inputs
from seqpar.linear.kinds import KINDS, kind
from tests.support.recurrent_cases import RecurrentCase, oracle
from tests.support.tiers import few_rows


@few_rows()
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("name", KINDS)
def test_steps_are_the_parallel_form(name, tokens):
    case = RecurrentCase(name, edges=(0, 12), q_heads=4, k_heads=2, v_heads=4)
    inputs, _, entering, _ = case.tensors()
    expected, state, outs = oracle(case), entering[0], []
    for start in range(0, 12, tokens):
        rows = start if tokens == 1 else slice(start, start + tokens)
        new = Inputs(*(x if x is None or x.dim() == 1 else x[:, rows] for x in inputs))
        out, state = decode_step(name, new, state, case.scale)
        outs.append(out)
    out = torch.stack(outs, 1) if tokens == 1 else torch.cat(outs, 1)
    torch.testing.assert_close(out, expected["out"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, expected["state_out"][0], rtol=1e-12, atol=1e-12)


def arguments(name="gated_delta"):
    case = RecurrentCase(name, edges=(0, 3), k_heads=1, dtype=torch.float32)
    q, k, v, log_decay, beta = case.tensors()[0]
    state = torch.zeros(2, 2, 8, 6)
    return {"q": q, "k": k, "v": v, "state": state, "log_decay": log_decay, "beta": beta}


def step(kind, state, scale=1.0, **inputs):
    return decode_step(kind, Inputs(**inputs), state, scale)


def test_no_tokens_change_nothing():
    call = {n: x if n == "state" else x[:, :0] for n, x in arguments().items()}
    out, state = step("gated_delta", **call)
    assert out.shape == (2, 0, 2, 6) and torch.equal(state, call["state"])


def test_bf16_is_computed_in_fp32():
    call = arguments()
    call = {n: x if n in ("state", "log_decay") else x.bfloat16() for n, x in call.items()}
    out, state = step("gated_delta", **call)
    exact, exact_state = step("gated_delta", **{n: x.double() for n, x in call.items()})
    assert out.dtype == torch.bfloat16 and state.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(state.double(), exact_state, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["linear", "kda"])
def test_autocast_does_not_change_a_step(name):
    """States are fp32, and a product of them in bf16 would keep 8 of their bits."""
    case = RecurrentCase(name, edges=(0, 3), dtype=torch.float32)
    call = name, Inputs(*case.tensors()[0]), torch.randn(2, 2, 8, 6)
    expected = decode_step(*call)
    with torch.autocast("cpu", torch.bfloat16):
        found = decode_step(*call)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


REFUSALS = [
    ({"q": [0.0]}, "q must be a tensor, got list"),
    ({"q": torch.zeros(3, 8)}, r"q must be \(N, H, D\) or \(N, t, H, D\), got \(3, 8\)"),
    ({"q": torch.zeros(2, 3, 2, 8).long()}, "q must be of one of the dtypes .*, got torch.int64"),
    (
        {"q": torch.zeros(2, 3, 3, 8)},
        "q must have .* multiple or a divisor of the 2 heads .* got 3",
    ),
    ({"k": torch.zeros(2, 2, 8)}, r"k must be \(N, H, D\) or"),
    ({"k": torch.zeros(2, 3, 1, 7)}, "k must have q's head dim, 8, got 7"),
    ({"k": torch.zeros(2, 2, 1, 8)}, "k must have q's 2 documents and 3 tokens, got"),
    ({"k": torch.zeros(2, 3, 3, 8)}, "v must have a number of heads that divides the 3"),
    ({"v": torch.zeros(2, 3, 2, 6).double()}, "v must be of q's dtype"),
    ({"state": torch.zeros(2, 2, 6, 8)}, r"state must be \(2, 2, 8, 6\) \(N, H, K, V\) of"),
    ({"state": torch.zeros(2, 2, 8, 6).half()}, "state must be .* of torch.float16"),
    ({"state": None}, "state must be a tensor, got NoneType"),
    ({"log_decay": None}, r"log_decay must be a tensor \(N, t, H\) for the kind 'gated_delta'"),
    ({"log_decay": torch.zeros(2, 3, 2, 8)}, r"log_decay must be \(N, t, H\), \(2, 3, 2\), of fl"),
    ({"log_decay": -0.1}, "log_decay must be a tensor, got float"),
    ({"beta": torch.zeros(2, 3, 2).long()}, "beta must be .* of torch.int64"),
    ({"beta": torch.zeros(2, 3, 2, device="meta")}, "beta must be on q's device, cpu, got meta"),
    ({"scale": "1"}, "scale must be"),
    ({"kind": "gated"}, r"kind must be one of \['linear', .*, got 'gated'"),
    ({"kind": "kda"}, r"log_decay must be \(N, t, H, K\), \(2, 3, 2, 8\), of floats"),
    ({"kind": "delta"}, r"log_decay must be None for the kind 'delta', got one of shape"),
    ({"kind": "scalar_decay"}, "beta must be None for the kind 'scalar_decay'"),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_refusals_name_the_argument(change, message):
    with pytest.raises(ValueError, match=message):
        step(**{"kind": "gated_delta"} | arguments() | change)


def test_every_kind_says_what_it_has():
    assert {name: (kind(name).transition, kind(name).decay) for name in KINDS} == {
        "linear": ("head", None),
        "constant_decay": ("head", "constant"),
        "scalar_decay": ("head", "head"),
        "vector_decay": ("key", "key"),
        "delta": ("matrix", None),
        "gated_delta": ("matrix", "head"),
        "kda": ("matrix", "key"),
    }
    assert [name for name in KINDS if kind(name).uses_beta] == ["delta", "gated_delta", "kda"]
    assert dataclasses.asdict(kind("kda"))["name"] == "kda"
