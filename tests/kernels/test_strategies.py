"""Every strategy on virtual ranks against the oracle, forward and backward: on a GPU if there is
one, with the default and with each backend that runs there."""

import pytest
import torch

from seqpar import Layout, use_backend
from seqpar.attention.backend import DEFAULT, current_backend
from seqpar.softmax.backends.flash_attn import PACKAGES, gpu_major, load_package
from tests.support import cases, linear_cases
from tests.support.cases import STRATEGIES, VARIANTS, Case
from tests.support.linear_cases import LinearCase
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

GPU = torch.cuda.is_available()
# Triton's interpreter is for one thread.
BACKENDS = [DEFAULT, "triton", "aten"] if GPU else [DEFAULT, "aten"]
if GPU:
    packages = [load_package(name, gpu_major(torch.device("cuda"))) for name in PACKAGES]
    if not all(isinstance(package, str) for package in packages):
        BACKENDS.append("flash_attn")
RANKS, TOKENS, DIM = (8, 1500, 128) if GPU else (2, 150, 16)
DOCUMENTS = [0, TOKENS // 2 + 7, TOKENS // 2 + 8, TOKENS]
LAYOUTS = {
    "zigzag": Layout.zigzag(DOCUMENTS, RANKS),
    "contiguous": Layout.contiguous(DOCUMENTS, RANKS),
    "striped": Layout.striped(DOCUMENTS, RANKS, stripe=64 if GPU else 8),
}
OPTIONS = {
    "plain": {},
    "lse, sinks, batch": {"dlse": True, "sinks": True, "batch": 2},
    "slopes": {"alibi": "heads", "dlse": True},
    "window, softcap": {"window": (TOKENS // 5, 0), "softcap": 3.0},
    "full": {"causal": False},
}
# Calls as most users make them: of what differs from a causal call of one document.
CALLS = {
    "1 document": {},
    "32 documents": {"layout": Layout.zigzag([TOKENS * i // 32 for i in range(33)], RANKS)},
    "window": {"window": (TOKENS // 5, 0)},
    "lse, sinks": {"dlse": True, "sinks": True},
    "fp8 messages": {"module_options": (("message_dtype", torch.float8_e4m3fn),)},
    "not deterministic": {"module_options": (("deterministic", False),)},
}
# Strategies whose keys travel, and can in 8 bits
WITH_EIGHT_BITS = ("all_gather", "mesh", "ring", "usp", "usp+all_gather", "usp+mesh")
COMMON = {"dim": DIM, "value_dim": DIM, "heads": 8, "device": "cuda" if GPU else "cpu"}


@pytest.mark.parametrize("strategy", [*STRATEGIES, *VARIANTS])
@pytest.mark.parametrize("call", CALLS)
def test_default_path(call, strategy):
    """In bf16, with the backend that is chosen where none is forced, as users call it."""
    if call == "fp8 messages" and strategy not in WITH_EIGHT_BITS:
        pytest.skip("the strategy has no messages in 8 bits")
    made = COMMON | {"kv_heads": 4, "dtype": torch.bfloat16, "backend": DEFAULT}
    made |= {"layout": Layout.zigzag(TOKENS, RANKS)} | CALLS[call]
    case = Case(strategy, causal=True, **made)
    for got in virtual(RANKS, cases.run, case):
        cases.assert_right(got, cases.oracle(case), case.dtype)


def test_default_path_forces_no_backend(monkeypatch):
    """Not even one that is forced around the call."""
    found, module = [], cases.module

    def noting(*arguments, **options):
        attn = module(*arguments, **options)

        def call(**operands):
            found.append(current_backend("softmax"))
            return attn(**operands)

        call.rank = attn.rank
        return call

    monkeypatch.setattr(cases, "module", noting)
    for backend in (DEFAULT, "aten"):
        case = Case("ring", LAYOUTS["zigzag"], causal=True, backend=backend, **COMMON)
        with use_backend("reference"):
            virtual(RANKS, cases.run, case)
    assert found == [DEFAULT] * RANKS + ["aten"] * RANKS


@few_rows(pairs=GPU)  # Triton's interpreter is slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", [*STRATEGIES, *VARIANTS])
def test_softmax(strategy, layout, backend, dtype, options):
    if backend == "flash_attn" and dtype == torch.float32:
        pytest.skip("the packages of FlashAttention are for half precision")
    settings = COMMON | {"causal": True, "kv_heads": 4} | OPTIONS[options]
    case = Case(strategy, LAYOUTS[layout], dtype=dtype, backend=backend, **settings)
    first, *others = virtual(RANKS, cases.run, case)
    cases.assert_right(first, cases.oracle(case), dtype)
    for other in others:
        for x, y in zip(first, other, strict=True):
            assert (x == y).all()


@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_softmax_of_equal_documents(strategy, dlse):
    """On sm_90 and sm_100 cuDNN computes them, and also such a backward."""
    layout = Layout.zigzag([0, 256 * RANKS, 512 * RANKS], RANKS)
    settings = COMMON | {"kv_heads": 4, "module_options": (("deterministic", False),)}
    case = Case(strategy, layout, True, dtype=torch.bfloat16, dlse=dlse, **settings)
    cases.assert_right(virtual(RANKS, cases.run, case)[0], cases.oracle(case), case.dtype)


@pytest.mark.exhaustive
@few_rows()
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("transport", ["all_gather", "scan"])
def test_linear(transport, layout, backend, dtype, causal):
    options = {"begun": True, "returned": True, "kv_heads": 4, "decay": 0.01 if causal else None}
    case = LinearCase(
        LAYOUTS[layout],
        causal=causal,
        dtype=dtype,
        backend=backend,
        transport=transport,
        **COMMON | options,
    )
    got = virtual(RANKS, linear_cases.run, case)[0]
    linear_cases.assert_right(got, linear_cases.oracle(case), dtype)
