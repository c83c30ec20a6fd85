"""ALiBi's slopes in every strategy and backend, against the oracle, and what is refused."""

import numpy as np
import pytest
import torch

from seqpar import Layout, make_attention, use_backend
from seqpar.comm.messages.comm import Comm
from seqpar.core.ranges import UNLIMITED
from seqpar.layout.masks.mask import Mask, Slices, slices_between
from seqpar.softmax.attend import attend, attend_backward
from seqpar.softmax.backends.pieces import cut_biased_slices, with_bias
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import OutputGradient, Partial, PartialGradients
from tests.support.cases import STRATEGIES, VARIANTS, Case, assert_right, module, oracle, run
from tests.support.mask_cases import disjoint_ranges
from tests.support.ranks import virtual
from tests.support.tiers import every_third_pair

CU, KV_CU = [0, 5, 5, 60, 101], [0, 9, 9, 90, 105]
LAYOUT = Layout.zigzag(CU, 3)
OTHER_KEYS = Layout.striped(KV_CU, 3, stripe=3)
SHORT_KEYS = Layout.striped([0, 2, 2, 21, 70], 3)
CASES = {
    "GQA": {"causal": True},
    "each batch entry's": {"causal": False, "batch": 2, "alibi": "batch"},
    "window": {"causal": False, "window": (20, 3), "backend": "reference"},
    "softcap and sinks": {"causal": True, "softcap": 1.5, "sinks": True},
    "negative scale": {"causal": True, "scale": -0.4, "backend": "reference"},
    "more keys, prefix": {"causal": True, "kv_layout": OTHER_KEYS, "prefix": (2, 0, 7, 3)},
    "fewer keys": {"causal": False, "kv_layout": SHORT_KEYS},
    "ranges": {"causal": False, "kv_layout": OTHER_KEYS, "ranges": disjoint_ranges(4, CU, KV_CU)},
    "bf16": {"causal": True, "dtype": torch.bfloat16},
    "fp32": {"causal": False, "dtype": torch.float32},
}


@pytest.mark.parametrize(
    ("strategy", "name"),
    every_third_pair([*STRATEGIES, *VARIANTS], list(CASES)),
)
def test_every_strategy_equals_the_oracle(strategy, name):
    options = {"alibi": "heads", "heads": 4, "kv_heads": 2, "dlse": True} | CASES[name]
    case = Case(strategy, LAYOUT, **options)
    expected = oracle(case)
    for got in virtual(3, run, case):
        assert_right(got, expected, case.dtype)


LONG = Layout.striped([0, 700, 1010], 2, stripe=40)


@pytest.mark.parametrize("options", [
    {"causal": False},
    {"causal": True, "kv_layout": Layout.zigzag([0, 900, 1500], 2)},
    {"causal": False, "window": (400, 300)},
    {"causal": True, "dtype": torch.bfloat16},
])  # fmt: skip
def test_long_documents_are_cut_by_sides(options):
    """Into pieces behind the queries, ahead of them, and around the diagonal."""
    case = Case("ring", LONG, alibi="heads", heads=4, kv_heads=2, dlse=True, **options)
    assert_right(virtual(2, run, case)[0], oracle(case), case.dtype)


@pytest.mark.parametrize(
    "mask",
    [Mask(UNLIMITED, UNLIMITED), Mask(UNLIMITED, 0), Mask(2000, 9)],
)
def test_most_masks_have_one_row(mask):
    geometry = Layout.contiguous(4096, 1).geometry
    slices = slices_between(geometry, 0, geometry, 0, mask)
    found = np.zeros((4096, 4096), np.int8)
    elements = 0
    for piece in cut_biased_slices(slices, 4):
        band, device = piece.band, torch.device("cpu")
        seen = True if band is None else slices.mask(piece.rows, piece.keys, band, device)
        found[piece.rows, piece.keys] += np.asarray(seen)
        of_piece = None if piece.band is None else torch.zeros(1)
        elements += with_bias(of_piece, piece, slices, torch.ones(1, 1))[0].numel()
    distance = np.arange(4096) - np.arange(4096)[:, None]
    expected = (distance >= -mask.left) & (distance <= mask.right)
    assert np.array_equal(found, expected)
    assert elements < (0.2 if mask.left == UNLIMITED else 0.4) * expected.sum()


def far_away(first, backend):
    """out, lse and gradients in fp32, of tokens of a document from position `first` on."""
    count = 40 if backend == "triton" else 300  # its interpreter is slow
    rows, positions = np.array([[0, count]]), np.arange(first, first + count, dtype=np.int32)
    tables = rows, rows, np.array([[-UNLIMITED, 0]]), positions, positions, rows
    slices, generator = Slices(*tables), torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, count, 2, 16, generator=generator) for _ in "qkv")
    options = CallOptions(0.25, 0.0, backend, True, torch.tensor([[0.5, 0.003]]))
    partial = Partial.nothing(q, v)
    attend(q, k, v, slices, partial, options)
    out, lse = partial.finish(None, q.dtype)
    gradients = PartialGradients.zeros(q, k, v)
    output = OutputGradient.of(out, None, out, lse, None)
    attend_backward(output, q, k, v, slices, gradients, options)
    return out, lse, gradients.dq, gradients.dk, gradients.dv


@pytest.mark.parametrize("backend", ["reference", "aten", "triton"])
def test_distances_are_exact_however_far_from_the_start(backend):
    """Slopes times positions would differ by a rounding of 2,000,000·slope."""
    pairs = zip(far_away(0, backend), far_away(4_000_001, backend), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)


def called(comm, options):
    q = torch.randn(LAYOUT.tokens_on(comm.rank), 4, 8, generator=torch.Generator().manual_seed(1))
    attn = module("ulysses", comm, check_ranks=True)
    return attn(q, q[:, :2], q[:, 2:], LAYOUT, causal=True, return_lse=True, **options)


def test_slopes_of_zero_change_nothing():
    with use_backend("reference"):
        plain, biased = (
            virtual(3, called, {"alibi_slopes": x}) for x in (None, torch.zeros(4, dtype=float))
        )
    for x, y in zip(plain, biased, strict=True):
        assert all(map(torch.equal, x, y))


def test_slopes_are_not_kept_between_calls():
    slopes = [torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([1.0, 0.0, -0.1, 2.0])]
    first, second, again, none, once = (
        virtual(3, called, {"alibi_slopes": x}) for x in (*slopes, slopes[0], None, None)
    )
    for x, y, z, plain, more in zip(first, second, again, none, once, strict=True):
        assert torch.equal(x[0], z[0]) and torch.equal(plain[0], more[0])
        assert not torch.equal(x[0], y[0]) and not torch.equal(x[0], plain[0])


def test_ranks_must_agree_on_them():
    def refused(comm):
        slopes = torch.ones(4)
        slopes[2] += comm.rank == 1
        with pytest.raises(ValueError, match="alibi_slopes"):
            called(comm, {"alibi_slopes": slopes})
        with pytest.raises(ValueError, match="alibi_slopes"):
            called(comm, {"alibi_slopes": slopes if comm.rank == 1 else None})

    virtual(3, refused)


def test_a_call_in_two_parts_is_the_same():
    def same(comm):
        attn = module("disaggregated", comm)
        q, k, v = (torch.randn(LAYOUT.tokens_on(comm.rank), 2, 8) for _ in "qkv")
        options = {"causal": True, "alibi_slopes": torch.tensor([0.3, 0.01])}
        begun = attn.begin(q, k, v, LAYOUT, **options)
        return torch.equal(attn.finish(begun), attn(q, k, v, LAYOUT, **options))

    assert virtual(3, same) == [True] * 3


def test_without_gradients_parameters_are_taken():
    slopes = torch.nn.Parameter(torch.ones(4))
    call = torch.zeros(LAYOUT.tokens_on(0), 4, 8), *[torch.zeros(LAYOUT.tokens_on(0), 2, 8)] * 2
    attn = make_attention("ring", Comm("silent", 0, 3))
    options = {"causal": True, "alibi_slopes": slopes}
    assert "must not require a gradient" in attn.unsupported(*call, LAYOUT, **options)
    with torch.no_grad():
        assert attn.unsupported(*call, LAYOUT, **options) is None


def test_meta_tensors_give_shapes():
    q = torch.empty(LAYOUT.tokens_on(0), 4, 8, device="meta", dtype=torch.bfloat16)
    attn = module("ring", Comm("silent", 0, 3), check_ranks=False)
    slopes = torch.empty(4, device="meta")
    assert attn(q, q, q, LAYOUT, causal=True, alibi_slopes=slopes).shape == q.shape
