"""Layouts with `most_documents`: calls do the same for all documents but for their tables, which
`load_tables` replaces. The meta device stands in for a GPU."""

import pickle
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from seqpar.kernels.flash_attention import launching
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from seqpar import LASP2Attention, Layout, Mask, RecurrentAttention, Routing, use_backend
from seqpar.core import device_tables
from seqpar.layout import replaced
from seqpar.softmax import softmax_operator
from tests.support.cases import module
from tests.support.steady import RANKS, SilentComm
from tests.support.tiers import examples, few_rows
from tests.unit.softmax.test_uploads import call

MOST, TOKENS = 6, 640
STRATEGIES = ["ring", "all_gather", "ulysses", "usp"]
MASKS = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "window": {"causal": True, "window_size": (70, 0)},
    "two sides": {"causal": False, "window_size": (100, 30), "return_lse": True},
}
documents = st.lists(st.integers(0, TOKENS), max_size=MOST - 1).map(
    lambda edges: [0, *sorted(edges), TOKENS]
)


def layout_of(cu_seqlens, ranks=RANKS, **options):
    return Layout.contiguous(cu_seqlens, ranks, equal=True, most_documents=MOST, **options)


class Program(TorchDispatchMode):
    """Records what a call does, in order, except for the values of tensors."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.steps = []
        monkeypatch.setattr(launching, "_run", self._launch)

    def _launch(self, launch, tensors):
        described = tree_map(_described, (launch.arguments, tensors))
        self.steps.append((launch.kernel.fn.__name__, launch.grid, launch.flags, described))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.steps.append((str(function), *tree_map(_described, (args, kwargs, result))))
        return result

    def exchange(self, sends, recvs):
        self.steps.append(tree_map(_described, (sends, recvs)))


def _described(x):
    return (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else x


def program(strategy, rank, layout, options):
    """Return what the second call of a layout does, forward and backward."""
    with pytest.MonkeyPatch.context() as monkeypatch, use_backend("triton"):
        recorded, comm = Program(monkeypatch), SilentComm(rank, RANKS)
        start = comm.start

        def recorded_start(sends, recvs, exchange):
            recorded.exchange(sends, recvs)
            return start(sends, recvs, exchange)

        monkeypatch.setattr(comm, "start", recorded_start)
        attn = module(strategy, comm)
        call(attn, layout, **options)
        recorded.steps.clear()
        with recorded:
            call(attn, layout, **options)
        return list(map(repr, recorded.steps))  # NaN is not equal to itself


@few_rows()
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_programs_are_alike_for_all_documents(strategy, mask):
    @examples(3, 12)
    @given(first=documents, second=documents, rank=st.integers(0, RANKS - 1))
    def check(first, second, rank):
        layouts = layout_of(first), layout_of(second)
        programs = [program(strategy, rank, layout, MASKS[mask]) for layout in layouts]
        assert programs[0] == programs[1]
        assert any("flash_forward" in step for step in programs[0])

    check()


def test_programs_differ_without_most_documents():
    layouts = [Layout.contiguous(cu, RANKS, equal=True) for cu in ([0, TOKENS], [0, 160, TOKENS])]
    first, second = (program("ring", 1, layout, MASKS["causal"]) for layout in layouts)
    assert first != second


class Read(Program):
    """Records the values of the tables that launches read."""

    def _launch(self, launch, tensors):
        super()._launch(launch, tensors)
        self.steps.append([x.tolist() for x in launch.arguments if isinstance(x, torch.Tensor)])


def tables_read(attn, layout, monkeypatch, **options):
    with use_backend("triton"):
        read = Read(monkeypatch)
        call(attn, layout, **options)
        return [x for x in read.steps if isinstance(x, list)]


@pytest.fixture
def copied(monkeypatch):
    """Copies for the meta device are on the CPU, where they have values."""
    new_copies = device_tables.new_copies

    def copies_with_values(tables, device):
        with pytest.MonkeyPatch.context() as clones:
            clones.setattr(torch.Tensor, "to", lambda x, *_, **__: x.clone())
            return new_copies(tables, device)

    for module_of_name in (device_tables, replaced):
        monkeypatch.setattr(module_of_name, "new_copies", copies_with_values)


@few_rows()
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_calls_read_loaded_tables(strategy, copied, monkeypatch):
    """All kinds of calls that the layout has had, with tables from another process."""
    attn, documents = module(strategy, SilentComm(1, RANKS)), [0, 160, TOKENS]
    layout, other = layout_of(documents), layout_of([0, 300, 310, 630, TOKENS])

    def read(layout):
        kinds = list(MASKS.values())[:3]
        return [tables_read(attn, layout, monkeypatch, **options) for options in kinds]

    own, expected = read(layout), read(layout_of([0, 300, 310, 630, TOKENS]))
    assert expected != own
    sizes = {"heads": 16, "kv_heads": 8, "head_dim": 16, "dtype": torch.bfloat16}
    with use_backend("triton"):
        other.prepare(attn, **sizes, device="meta", causal=True)
    layout.load_tables(pickle.loads(pickle.dumps(other)))
    assert read(layout) == expected
    assert read(layout_of(documents)) == own  # it is equal, but its tables were not replaced
    other = layout_of(documents)
    read(other)
    other.load_tables(layout_of([0, TOKENS]))
    layout.load_tables(other)  # whose tables of its own documents were replaced on the device
    assert read(layout) == own


def test_new_kinds_of_calls_are_refused_afterwards(copied, monkeypatch):
    layout, attn = layout_of([0, 160, TOKENS]), module("ring", SilentComm(1, RANKS))
    tables_read(attn, layout, monkeypatch, **MASKS["causal"], backward=False)
    layout.load_tables(layout_of([0, 300, TOKENS]))
    tables_read(attn, layout, monkeypatch, **MASKS["causal"], backward=False)
    for options in (MASKS["window"], MASKS["causal"]):  # the latter now with a backward
        with pytest.raises(
            ValueError, match="layout must have had a call with the same options before load_tables"
        ):
            tables_read(attn, layout, monkeypatch, **options)


@few_rows()
@pytest.mark.parametrize("cu_seqlens", [[0, 32768], [0, 160, 9000, 32768]])
def test_tables_of_several_ranks_and_a_window_fit(cu_seqlens):
    """In all_gather a tile has a run of each rank, and a window moves where they start."""
    attn, layout = module("all_gather", SilentComm(6, 8)), layout_of(cu_seqlens, 8)
    sizes = {"heads": 2, "head_dim": 16, "dtype": torch.float32}
    with use_backend("triton"):
        layout.prepare(attn, **sizes, device="meta", causal=True, window_size=(15001, 0))


def test_a_remembered_call_keeps_no_layout(copied, monkeypatch):
    attn = module("ring", SilentComm(1, RANKS))

    def call_once():
        layout = layout_of([0, 160, TOKENS])
        tables_read(attn, layout, monkeypatch, **MASKS["causal"])
        return weakref.ref(layout.geometry)

    assert call_once()() is None


def test_empty_documents_fill_up_a_layout():
    layout = Layout.contiguous([0, 5, 9], 2, equal=True, multiple_of=8, most_documents=4)
    assert layout.cu_seqlens.tolist() == [0, 5, 9, 9, 9, 16] and layout.documents == 5
    assert layout.padding(1).tolist() == [False] + [True] * 7
    assert layout == Layout.contiguous([0, 5, 9], 2, equal=True, multiple_of=8, most_documents=4)
    assert layout != Layout.contiguous([0, 5, 9, 9, 9], 2, equal=True, multiple_of=8)


def test_wrong_limits_are_refused():
    for options, message in [
        ({"most_documents": 3}, "most_documents needs equal=True, got 3"),
        ({"most_documents": 1, "equal": True}, "cu_seqlens must have at most 1 documents, got 2"),
        ({"most_documents": 0, "equal": True}, "most_documents must be"),
        ({"most_documents": 2.5, "equal": True}, "most_documents must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            Layout.contiguous([0, 3, 8], 2, **options)


def test_other_layouts_are_not_loaded(copied, monkeypatch):
    layout, attn = layout_of([0, TOKENS]), module("ring", SilentComm(1, RANKS))
    with pytest.raises(ValueError, match="layout must have had a call on a GPU"):
        layout.load_tables(layout_of([0, TOKENS]))
    tables_read(attn, layout, monkeypatch, **MASKS["causal"])
    with pytest.raises(ValueError, match="layout must have no most_documents: the number of chun"):
        layout.chunked(4)
    with pytest.raises(ValueError, match="layout must have most_documents"):
        Layout.contiguous([0, TOKENS], RANKS).load_tables(layout)
    for other, message in [
        (5, "other must be a seqpar.Layout, got int"),
        (layout, "other must be a different layout"),
        (layout_of([0, TOKENS], multiple_of=161), "got 7 documents, 4 ranks and 644 tokens"),
        (layout_of([0, TOKENS], 5), "5 ranks"),
        (Layout.contiguous([0, TOKENS], RANKS, equal=True), "got 0 documents"),
    ]:
        with pytest.raises(ValueError, match=message):
            layout.load_tables(other)


LIMITED = layout_of([0, 160, TOKENS])
REFUSALS = [
    ({"prefix_lens": [0] * (MOST + 1)}, "prefix_lens must be left out"),
    ({"mask": Mask.of_ranges([(0, 0, 9, 0, 9, None, 0)]), "causal": False}, "mask must be left"),
    ({"kv_layout": Layout.contiguous(LIMITED.cu_seqlens, RANKS)}, "kv_layout must be left out"),
    ({"return_max_logits": True}, "return_max_logits must be False"),
]


@few_rows()
@pytest.mark.parametrize(("options", "message"), REFUSALS, ids=lambda x: str(x)[:12])
def test_calls_that_depend_on_documents_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        call(module("ring", SilentComm(1, RANKS)), LIMITED, **{"causal": True} | options)


@few_rows()
@pytest.mark.parametrize(
    ("strategy", "module_options", "message"),
    [
        ("token_ring", {}, "no most_documents with 'token_ring'"),
        ("mesh", {}, "no most_documents with 'mesh'"),
        ("disaggregated", {}, "no most_documents with 'disaggregated'"),
        ("usp", {"outer": "token_ring"}, "no most_documents with 'usp'"),
        ("ring", {"deterministic": "ranks"}, 'no most_documents with deterministic="ranks"'),
        ("ulysses", {"deterministic": "ranks"}, 'no most_documents with deterministic="ranks"'),
    ],
)
def test_strategies_that_read_documents_refuse(strategy, module_options, message):
    attn = module(strategy, SilentComm(1, RANKS), **module_options)
    with pytest.raises(ValueError, match=message):
        call(attn, LIMITED, causal=True)
    sizes = {"heads": 16, "kv_heads": 8, "head_dim": 16, "dtype": torch.bfloat16}
    with pytest.raises(ValueError, match=message):
        LIMITED.prepare(attn, **sizes, causal=True)


def test_routing_is_refused():
    """Ranks agree on routes once per layout, and equal layouts do not share what they know."""
    attn = module("ring", SilentComm(1, RANKS), routing=Routing(2))
    with pytest.raises(ValueError, match="layout must have no most_documents with routing"):
        call(attn, LIMITED, causal=True)


def test_gpus_only_take_our_kernels(monkeypatch):
    monkeypatch.setattr(softmax_operator, "is_on_cuda", lambda x: True)
    attn = module("ring", SilentComm(1, RANKS))
    with use_backend("aten"), pytest.raises(ValueError, match="use_backend must be triton"):
        call(attn, LIMITED, causal=True)
    q = torch.empty(TOKENS // RANKS, 2, 16, dtype=torch.float64, device="meta")
    with pytest.raises(ValueError, match="no most_documents for this call: q must be bf16"):
        attn(q, q, q, LIMITED, causal=True)


def test_linear_attention_refuses_a_limit():
    x, comm = torch.zeros(TOKENS // RANKS, 2, 16), SilentComm(1, RANKS)
    for attn, options in [
        (LASP2Attention(comm), {}),
        (RecurrentAttention(comm, "delta"), {"beta": x[..., 0]}),
    ]:
        with pytest.raises(ValueError, match="layout must have no most_documents: what linear"):
            attn(x, x, x, LIMITED, **options)
