"""cuDNN through ATen, with a stand-in of its operators that computes on CPUs."""

import inspect

import pytest
import torch

from seqpar import Layout, make_attention, use_backend
from seqpar.layout.masks.mask import UNLIMITED, Mask, slices_between
from seqpar.softmax.backends import aten_cuda, kernel_order, triton
from seqpar.softmax.backends.aten_cuda import load_cudnn
from seqpar.softmax.backends.varlen import BackwardRows, VarlenTables
from seqpar.softmax.compute.call_options import CallOptions
from tests.support import varlen_kernels
from tests.support.cases import Case, assert_right, oracle, run
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

ONE, EQUAL, OTHERS = [0, 512], [0, 512, 1024], [0, 512, 1280]
FULL, CAUSAL, WINDOW = Mask(UNLIMITED, UNLIMITED), Mask(UNLIMITED, 0), Mask(200, 0)


@pytest.fixture(autouse=True)
def cudnn(monkeypatch):
    """A CPU passes for an sm_90 with cuDNN 9.10."""
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    monkeypatch.setattr(aten_cuda, "computes", lambda q: True)
    monkeypatch.setattr(kernel_order, "gpu_major", lambda device: 9)
    load_cudnn.cache_clear()
    yield
    load_cudnn.cache_clear()


@pytest.fixture
def calls(monkeypatch):
    """The shapes (S, H, L, D) of q and k in calls of the stand-ins, by direction."""
    found = {"forward": [], "backward": []}

    def recorded(way, first):
        def call(*args, **options):
            found[way].append(tuple(tuple(x.shape) for x in args[first : first + 2]))
            return getattr(varlen_kernels, f"cudnn_{way}")(*args, **options)

        return lambda: call

    monkeypatch.setattr(aten_cuda, "cudnn_attention", recorded("forward", 0))
    monkeypatch.setattr(aten_cuda, "cudnn_attention_backward", recorded("backward", 1))
    others = {"": varlen_kernels.aten_forward, "_backward": varlen_kernels.aten_backward}
    for way, kernel in others.items():  # of the rows that cuDNN's mask does not fit
        monkeypatch.setattr(aten_cuda, f"cuda_attention{way}", lambda kernel=kernel: kernel)
    return found


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_stand_ins_have_atens_signature(way):
    name = "_scaled_dot_product_cudnn_attention" + "_backward" * (way == "backward")
    schema = getattr(torch.ops.aten, name).default._schema
    stand_in = inspect.signature(getattr(varlen_kernels, f"cudnn_{way}"))
    only, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    expected = [
        (x.name, x.kwarg_only, x.default_value if x.has_default_value() else empty)
        for x in schema.arguments
    ]
    assert expected == [(x.name, x.kind is only, x.default) for x in stand_in.parameters.values()]
    assert len(schema.returns) == (9 if way == "forward" else 3)


@few_rows()
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": False}, {"batch": 2}, {"dlse": True, "sinks": True}, {"scale": -0.5}],
)
def test_equals_the_oracle(calls, strategy, options):
    layout = Layout.zigzag(EQUAL, 2)
    kinds = {"causal": True, "dtype": torch.bfloat16, **options}
    case = Case(strategy, layout, module_options=(("deterministic", False),), **kinds)
    assert_right(virtual(2, run, case)[0], oracle(case), case.dtype, roundings=4)
    assert calls["forward"] and calls["backward"]
    batch = 2 * options.get("batch", 1)
    assert {q[0] for shapes in calls.values() for q, _ in shapes} <= {batch}


def test_calls_over_keys_of_several_ranks_stay_dense(calls):
    """One call that reads keys twice would have segments of two lengths."""
    layout = Layout.zigzag([0, 1280, 2560], 5)
    options = {"dtype": torch.bfloat16, "module_options": (("deterministic", False),)}
    case = Case("all_gather", layout, causal=True, heads=1, kv_heads=1, **options)
    assert_right(virtual(5, run, case)[0], oracle(case), case.dtype, roundings=4)
    shapes = {(q[0], q[2], k[2]) for q, k in calls["forward"]}
    assert {(2, 256, 128), (2, 128, 256)} <= shapes
    assert {documents for documents, _, _ in shapes} == {2}


def test_a_deterministic_backward_is_tritons(calls, monkeypatch):
    seen = []
    monkeypatch.setattr(triton, "backward", lambda *arguments: seen.append("triton"))

    def call(comm):
        q = torch.randn(128, 2, 8).bfloat16().requires_grad_()
        with use_backend("aten"):
            out = make_attention("ring", comm)(q, q, q, Layout.zigzag(128, 1), causal=True)
        out.sum().backward()

    virtual(1, call)
    assert seen == ["triton"] and len(calls["forward"]) == 1 and not calls["backward"]


def test_backward_copies_strided_gradients(calls):
    """Torch would use a plan for other strides; the stand-in refuses them."""
    wide, lse = torch.randn(2, 256, 4, 8).bfloat16(), torch.zeros(2, 256)
    dout, out = wide[:, :, ::2]
    q = torch.randn(256, 2, 8).bfloat16()
    lengths = torch.tensor([0, 128, 256], dtype=torch.int32)
    tables = VarlenTables(lengths, lengths, 128, 128, (-1, 0), (128, 128))
    options = CallOptions(1.0, 0.0, "aten", False)
    results = load_cudnn(9).backward(tables, options)(BackwardRows(dout, q, out, lse, None, q, q))
    assert [x.shape for x in results] == [q.shape] * 3


@pytest.mark.parametrize(
    ("documents", "mask", "dim", "options", "computes"),
    [
        (ONE, CAUSAL, 256, {}, False),  # its gradient of lse takes a column
        (ONE, CAUSAL, 248, {}, True),
        (ONE, FULL, 128, {}, True),
        (EQUAL, CAUSAL, 128, {}, True),
        (OTHERS, CAUSAL, 128, {}, False),
        ([0, 500], CAUSAL, 128, {}, False),
        (ONE, WINDOW, 128, {}, False),
        (ONE, CAUSAL, 128, {"softcap": 1.0}, False),
        (ONE, CAUSAL, 128, {"slopes": torch.ones(1, 2)}, False),
    ],
)
def test_which_calls_it_computes(documents, mask, dim, options, computes):
    geometry = Layout.contiguous(documents, 1).geometry
    slices = slices_between(geometry, 0, geometry, 0, mask)
    scores = {"scale": 1.0, "softcap": 0.0, "backend": "aten", "deterministic": True}
    q = torch.empty(1, documents[-1], 2, dim, dtype=torch.bfloat16, device="meta")
    chosen = CallOptions(**scores | options)
    kernel = load_cudnn(9)
    assert kernel.computes_all(q, q, slices, chosen) == computes
    assert kernel_order.aten_kernel(q, q, slices, chosen) is (
        kernel if computes else aten_cuda.KERNEL
    )


def test_causal_rows_with_earlier_keys_are_not_its():
    """Its mask is aligned at the first key, and not at the last one."""
    geometry = Layout.contiguous(1024, 2).geometry
    whole = Layout.contiguous(1024, 1).geometry
    slices = slices_between(geometry, 1, whole, 0, CAUSAL)
    q = torch.empty(1, 512, 2, 128, dtype=torch.bfloat16, device="meta")
    options = CallOptions(1.0, 0.0, "aten", True)
    assert aten_cuda.KERNEL.computes_all(q, q, slices, options)
    assert not load_cudnn(9).computes_all(q, q, slices, options)


@pytest.mark.parametrize("major", [8, 12])
def test_other_gpus_do_not_use_it(major):
    assert load_cudnn(major) == f"cuDNN is not used on sm_{major}x"


def chosen():
    """The kernel of the backend "aten" for a document that cuDNN computes."""
    geometry = Layout.contiguous(128, 1).geometry
    slices = slices_between(geometry, 0, geometry, 0, CAUSAL)
    q = torch.empty(1, 128, 2, 128, dtype=torch.bfloat16, device="meta")
    return kernel_order.aten_kernel(q, q, slices, CallOptions(1.0, 0.0, "aten", True))


@pytest.mark.parametrize("enabled", [True, False])
def test_torchs_switch_turns_it_off(monkeypatch, enabled):
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: enabled)
    assert (chosen() is load_cudnn(9)) == enabled


def test_torchs_switch_holds_for_calls_on_a_known_layout(calls, monkeypatch):
    """The first call keeps its kernels with the layout."""
    options = {"dtype": torch.bfloat16, "module_options": (("deterministic", False),)}
    case = Case("ring", Layout.zigzag(EQUAL, 1), causal=True, **options)
    virtual(1, run, case)
    assert calls["forward"]
    calls["forward"].clear()
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    virtual(1, run, case)
    assert not calls["forward"]


@pytest.mark.parametrize(
    ("version", "reason"),
    [(None, "cuDNN must be 9.10 or newer, got None"), (90800, "9.10 or newer, got 90800")],
)
def test_an_old_or_missing_cudnn_gives_its_reason(calls, monkeypatch, version, reason):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    assert reason in load_cudnn(9)
    assert chosen() is aten_cuda.KERNEL


def test_a_cudnn_that_torch_refuses_gives_its_reason(monkeypatch):
    def version():
        raise RuntimeError("version incompatibility")

    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    assert load_cudnn(9) == "cuDNN is broken: version incompatibility"
