"""Layouts by their content: handles that are copied, sent elsewhere or outlive the layout."""

import copy
import gc
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from seqpar import LASP2Attention, Layout, make_attention
from seqpar.layout.handle import from_handle
from tests.support.calls import local
from tests.support.cases import cu_seqlens, layouts
from tests.support.ranks import virtual
from tests.support.tiers import examples

CU = [0, 7, 7, 31]
KINDS = {
    "contiguous": lambda: Layout.contiguous(CU, 3),
    "zigzag": lambda: Layout.zigzag(CU, 3),
    "striped": lambda: Layout.striped(CU, 3, stripe=4),
    "spans": lambda: Layout.from_spans([[(0, 0, 7)], [(2, 0, 9)], [(2, 9, 24)]], CU),
    "short": lambda: Layout.zigzag(CU, 3, min_chunk=3),
    "default stripes": lambda: Layout.striped(CU, 3),
    "equal": lambda: Layout.zigzag(CU, 3, equal=True),
    "chunked": lambda: Layout.zigzag(CU, 3).chunked(5).chunked(2),
}
READ = """
import sys, torch
from seqpar import Layout
from seqpar.layout.handle import from_handle
others = [Layout.zigzag(tokens, 3) for tokens in range(9)]
for handle in torch.load(sys.argv[1]):
    held = [holding.columns for holding in from_handle(handle).holdings]
    print([[column.tolist() for column in columns] for columns in held])
"""


def held(geometry):
    return [[column.tolist() for column in holding.columns] for holding in geometry.holdings]


@pytest.mark.parametrize("kind", KINDS)
def test_a_copied_handle_outlives_its_layout(kind):
    layout = KINDS[kind]()
    cu = layout.cu_seqlens.tolist()
    expected, other, geometry = held(layout.geometry), layout._handle.clone(), layout.geometry
    assert from_handle(other) is from_handle(layout._handle) is geometry
    geometry = weakref.ref(geometry)
    del layout
    assert geometry() is None
    again = from_handle(other)
    assert held(again) == expected and again.cu_seqlens.tolist() == cu
    again = weakref.ref(again)
    assert again() is from_handle(other)  # made once for a copy, and kept with it
    del other
    assert again() is None


@pytest.mark.exhaustive
def test_a_handle_works_in_another_process(tmp_path):
    saved, made = tmp_path / "handles.pt", [make() for make in KINDS.values()]
    torch.save([layout._handle for layout in made], saved)
    command = [sys.executable, "-c", READ, str(saved)]
    out = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    assert out.splitlines() == [str(held(layout.geometry)) for layout in made]


def test_a_changed_handle_is_refused():
    handle = Layout.zigzag(CU, 5)._handle.clone()
    handle[-1] += 1
    for changed in (handle, Layout.zigzag(CU, 5)._handle.float()):
        with pytest.raises(ValueError, match=r"layout: .* changed"):
            from_handle(changed)


@examples(30, 300)
@given(st.data())
def test_layouts_with_equal_spans_are_equal(data):
    cu, ranks = data.draw(cu_seqlens(max_tokens=8)), data.draw(st.integers(1, 3))
    one, two = (data.draw(layouts(cu, ranks)) for _ in range(2))
    spans_of = [[layout.spans(rank) for rank in range(ranks)] for layout in (one, two)]
    assert (one == two) == (spans_of[0] == spans_of[1])
    assert (one.geometry.digest == two.geometry.digest) == (one == two)
    assert (one.geometry.described() == two.geometry.described()) == (one == two)
    listed = Layout.from_spans(spans_of[0], cu)
    for same in (listed, pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
        assert same == one and hash(same) == hash(one)
        assert same.geometry.digest == one.geometry.digest
        assert same.geometry.described() == one.geometry.described()
    assert one != Layout.from_spans([*spans_of[0], []], cu) and one != cu


def test_equal_layouts_share_what_is_derived():
    one, two = Layout.zigzag(CU, 3), Layout.zigzag(torch.tensor(CU), 3)
    assert one.geometry is two.geometry and {one: 1}[two] == 1


def test_digest_is_that_of_other_machines_and_versions():
    digests = {kind: make().geometry.digest[:16] for kind, make in KINDS.items()}
    assert digests == {
        "contiguous": "ce97f3d9a76ed0ce",
        "zigzag": "019c937210142442",
        "striped": "e92b37f9a1cc4088",
        "spans": "c8001ed0532ceffe",
        "short": "617ff8d5acb7bb7d",
        "default stripes": "b49e8392244d4c0e",
        "equal": "fc9d0333a76e6bdb",
        "chunked": "be5c8c073cd68939",
    }


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_copying_saved_tensors_keeps_backwards_layout(kind):
    def train(comm, copies):
        attn = LASP2Attention(comm) if kind == "linear" else make_attention("ring", comm)
        layout = Layout.zigzag([0, 5, 24], comm.size)
        q, k, v = local(layout, comm.rank)
        with torch.autograd.graph.save_on_cpu() if copies else torch.enable_grad():
            out = attn(q, k, v, layout, causal=True)
        geometry = weakref.ref(layout.geometry)
        del layout
        gc.collect()
        assert geometry() is not None
        out.sum().backward()
        return q.grad, k.grad, v.grad

    for copied, plain in zip(virtual(2, train, True), virtual(2, train, False), strict=True):
        assert all(map(torch.equal, copied, plain))


def test_a_layout_made_under_inference_mode_trains():
    with torch.inference_mode():
        layout = Layout.zigzag([0, 5, 24], 1)

    def train(comm):
        q, k, v = local(layout, comm.rank)
        make_attention("ring", comm)(q, k, v, layout, causal=True).sum().backward()
        return q.grad.isfinite().all()

    assert virtual(1, train) == [True]


def test_the_rank_check_accepts_equal_layouts():
    zigzag = Layout.zigzag([0, 5, 24], 2)
    listed = Layout.from_spans([zigzag.spans(rank) for rank in range(2)], [0, 5, 24])
    other = Layout.from_spans([zigzag.spans(rank) for rank in (1, 0)], [0, 5, 24])

    def call(comm, layouts):
        q, k, v = local(layouts[comm.rank], comm.rank)
        return make_attention("ring", comm, check_ranks=True)(
            q, k, v, layouts[comm.rank], causal=True
        )

    same, made_apart = virtual(2, call, [zigzag] * 2), virtual(2, call, [zigzag, listed])
    assert all(map(torch.equal, same, made_apart))
    with pytest.raises(ValueError, match="layout must be the same on all ranks"):
        virtual(2, call, [zigzag, other])


def test_layouts_shard_tokens_under_a_fake_mode():
    layout = Layout.zigzag([0, 5, 24], 2)
    with FakeTensorMode():
        assert layout.position_ids(0).shape == (12,)
        assert layout.shard(torch.empty(24, 3), 1).shape == (12, 3)


@pytest.mark.parametrize("name", ["token_indices", "position_ids"])
def test_operators_pass_opcheck(name):
    layout = Layout.zigzag([0, 5, 12], 2)
    arguments = layout._handle, 1, layout.tokens_on(1)
    torch.library.opcheck(getattr(torch.ops.seqpar, name).default, arguments)
