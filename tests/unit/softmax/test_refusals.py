"""What a call and a module refuse, by name, before anything is sent."""

import copy

import pytest
import torch

import seqpar
from seqpar import Layout, Mask
from seqpar.comm.messages.comm import Comm
from tests.support.cases import STRATEGIES, module
from tests.support.plans import at_home
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

LAYOUT = Layout.zigzag([0, 10, 24], 2)
RANGES = Mask.of_ranges([(0, 0, 10, 0, 10, None, 0), (1, 3, 9, 0, 14, -2, 5)])


REFUSALS = [
    (
        {"q": (11, 2, 8)},
        r"q must have the 12 tokens its layout gives this rank, got 11 in \(B, T, H, D\) = "
        r"\(1, 11, 2, 8\) \(rank 0 of 2\)",
    ),
    ({"k": (13, 1, 8)}, "k must have the 12 tokens"),
    ({"v": (13, 1, 8)}, "v must have the 12 tokens"),
    (
        dict.fromkeys("qkv", (1, 2, 12, 8)),
        r"q must have the 12 tokens its layout gives this rank, got 2 in \(B, T, H, D\) = "
        r"\(1, 2, 12, 8\): if heads come before tokens, pass q.transpose\(-3, -2\)",
    ),
    (
        {"q": (24, 2, 8)},
        r"got 24 in .* = \(1, 24, 2, 8\): if q has the tokens of all ranks, pass layout.shard\(q",
    ),
    ({"q": (12, 8)}, "q must be \\(T, H, D\\)"),
    ({"k": (1, 12, 1, 8)}, "k must be \\(T, H, D\\) like q"),
    (
        {"q": (2, 12, 2, 8), "k": (3, 12, 1, 8), "v": (2, 12, 1, 8)},
        "k must have q's batch size, 2, got 3",
    ),
    ({"k": (12, 1, 4)}, "k must have q's head dim, 8, got 4"),
    ({"v": (12, 2, 8)}, "v must have k's number of heads, 1, got 2"),
    ({"k": (12, 3, 8), "v": (12, 3, 8)}, "q must have a multiple of k's 3 heads, got 2"),
    ({"k": (12, 0, 8), "v": (12, 0, 8)}, "k must have at least one head"),
    (
        {"q": torch.zeros(12, 2, 8, dtype=torch.float64)},
        "k must be of q's dtype, torch.float64, got torch.float32: cast k, or .*torch.autocast",
    ),
    ({"q": torch.zeros(12, 2, 8, dtype=torch.int64)}, "q must be of one of the dtypes"),
    ({"k": torch.zeros(12, 1, 8, device="meta")}, "k must be on q's device, cpu, got meta"),
    ({"layout": Layout.zigzag(36, 3)}, "layout must be for the group's 2 ranks, got one for 3"),
    ({"layout": 5}, "layout must be a seqpar.Layout, got int"),
    ({"kv_layout": Layout.zigzag(24, 2)}, "kv_layout must have layout's 2 documents, got 1"),
    ({"kv_layout": 5}, "kv_layout must be a seqpar.Layout"),
    ({"causal": 1}, "causal must be True or False, got 1"),
    ({"window_size": (-2, 0)}, "window_size.*at least -1, got -2"),
    ({"window_size": (3,)}, "window_size must be two integers"),
    ({"window_size": 5}, r"window_size must be two integers, .*, got 5: .* is \(w - 1, 0\)"),
    ({"window_size": (3.5, 0)}, "window_size: a bound .* must be an integer, got 3.5"),
    ({"prefix_lens": [1]}, "prefix_lens must have one entry a document, 2, got 1"),
    ({"prefix_lens": [1, 15]}, "prefix_lens\\[1\\] must lie in 0 to 14"),
    ({"prefix_lens": [0.5, 1.0]}, "prefix_lens must be a 1-D sequence of integers"),
    ({"prefix_lens": torch.zeros(2)}, "prefix_lens must be a 1-D sequence of integers"),
    ({"mask": 3}, "mask must be made by seqpar.Mask.of_ranges.*, got 3"),
    ({"mask": Mask(5, 0)}, "mask must be made by seqpar.Mask.of_ranges"),
    ({"mask": RANGES}, "causal must be left out, or False, because mask has all ranges"),
    ({"mask": RANGES, "causal": 3}, "causal must be True or False, got 3"),
    (
        {"mask": RANGES, "causal": False, "window_size": (3, 0)},
        "window_size must be unlimited, because mask.*got .3, 0",
    ),
    (
        {"mask": RANGES, "causal": False, "prefix_lens": [1, 2]},
        "prefix_lens must be None, because mask.*got .1, 2",
    ),
    (
        {"mask": Mask.of_ranges([(2, 0, 1, 0, 1, None, None)]), "causal": False},
        "mask must have ranges of the layout's documents only, got .* document 2 of 2",
    ),
    (
        {"mask": Mask.of_ranges([(1, 0, 15, 0, 1, None, None)]), "causal": False},
        "mask must have ranges within .* got queries up to 15 of document 1, which has 14",
    ),
    (
        {"mask": Mask.of_ranges([(0, 0, 1, 3, 11, None, None)]), "causal": False},
        "mask must have ranges within .* got keys up to 11 of document 0, which has 10",
    ),
    ({"softmax_scale": float("nan")}, "softmax_scale must be finite"),
    ({"softmax_scale": 1e39}, "softmax_scale must be finite, 0 or of .*got 1e\\+39"),
    ({"softmax_scale": -1e-40}, "softmax_scale must be finite, 0 or of .*got -1e-40"),
    ({"softmax_scale": "1"}, "softmax_scale must be a number, got '1'"),
    (
        {"softmax_scale": torch.ones(3)},
        "softmax_scale must be a number, or .*\\(2,\\), one per query",
    ),
    ({"softmax_scale": torch.ones(2, device="meta")}, "softmax_scale must be .* on meta"),
    ({"softcap": torch.tensor(2.0, requires_grad=True)}, "softcap must not require a gradient"),
    ({"softcap": 10**400}, "softcap must be a number"),
    ({"softcap": float("inf")}, "softcap must be finite"),
    ({"softcap": 1e-40}, "softcap must be 0 \\(none\\) or at least 1e-30, got 1e-40"),
    ({"softcap": 1e-9, "softmax_scale": 1e35}, "softcap must be .* at least 0.000294, got 1e-09"),
    ({"softcap": -1.0}, "softcap must be finite and not negative"),
    ({"alibi_slopes": torch.ones(3)}, "alibi_slopes must be \\(2,\\) or \\(1, 2\\).* \\(3,\\) of"),
    ({"alibi_slopes": torch.ones(2, 2)}, "alibi_slopes must be .*got \\(2, 2\\) of torch.float32"),
    ({"alibi_slopes": torch.ones(2).bfloat16()}, "alibi_slopes must be .*fp32 or fp64.*bfloat16"),
    ({"alibi_slopes": torch.ones(2, dtype=torch.int64)}, "alibi_slopes must be .*torch.int64"),
    ({"alibi_slopes": torch.ones(2, device="meta")}, "alibi_slopes must be on q's device"),
    ({"alibi_slopes": [0.5, 0.25]}, "alibi_slopes must be a tensor"),
    ({"alibi_slopes": torch.ones(2, requires_grad=True)}, "alibi_slopes must not require a grad"),
    ({"sinks": torch.zeros(3)}, "sinks must be \\(2,\\) floats"),
    ({"sinks": torch.zeros(2, dtype=torch.int64)}, "sinks must be \\(2,\\) floats"),
    ({"sinks": torch.zeros(2, device="meta")}, "sinks must be on q's device"),
    ({"dropout_p": 0.1}, "dropout_p must be 0, got 0.1"),
]


@few_rows(pairs=False)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_refusals_name_the_argument_and_send_nothing(strategy, change, message):
    comm = Comm("silent", 0, 2)  # whose exchange would fail: it has no group
    attn = module(strategy, comm)
    call = {
        "q": (12, 2, 8),
        "k": (12, 1, 8),
        "v": (12, 1, 8),
        "layout": LAYOUT,
        "causal": True,
    } | change
    call |= {name: torch.zeros(call[name]) for name in "qkv" if isinstance(call[name], tuple)}
    with pytest.raises(ValueError, match=message):
        attn(**call)
    assert attn.unsupported(**call) is not None
    assert comm.sent_messages == 0
    good = {
        "q": torch.zeros(12, 2, 8),
        "k": torch.zeros(12, 1, 8),
        "v": torch.zeros(12, 1, 8),
        "layout": LAYOUT,
        "causal": True,
    }
    assert attn.unsupported(**good, return_lse=True, softcap=2.0) is None


@pytest.mark.parametrize(
    "take",
    [
        seqpar.RingAttention,
        seqpar.LASP2Attention,
        seqpar.USPAttention,
        lambda group: seqpar.make_attention("ring", group),
        lambda group: seqpar.sdpa(*[torch.zeros(2, 12, 8)] * 3, LAYOUT, group),
        lambda group: seqpar.context_parallel(group, LAYOUT).__enter__(),
        lambda group: seqpar.token_shift(torch.zeros(12, 8), LAYOUT, group),
        lambda group: LAYOUT.unshard(torch.zeros(12), group),
        lambda group: seqpar.exposure(list, group),
        lambda group: seqpar.Trace().gather(group),
    ],
)
def test_a_missing_group_names_init_process_group(take):
    found = "got None: first call torch.distributed.init_process_group; then torch.dist.*WORLD"
    with pytest.raises(ValueError, match=f"^group must be a process group .*, {found}"):
        take(None)


def test_a_group_is_not_taken_for_its_size():
    group = torch.distributed.ProcessGroup(0, 2)
    for take in (
        lambda: Layout.zigzag(8, group),
        lambda: seqpar.best_mesh(group, q_heads=2, kv_heads=2),
    ):
        with pytest.raises(ValueError, match=r"^ranks must be an integer, .*get_world_size\(group"):
            take()


def test_groups_are_checked():
    layout = Layout.zigzag(8, 2)
    with pytest.raises(ValueError, match="group must have the layout's 2 ranks, got 3"):
        layout.unshard(torch.zeros(4), Comm("three", 0, 3))
    with pytest.raises(
        ValueError, match="x_local must have 4 tokens \\(rank 1's\\) along dim 0, got \\(5,\\)"
    ):
        layout.unshard(torch.zeros(5), Comm("two", 1, 2))


def test_modules_are_copied_with_their_group_and_print():
    def build(comm):
        model = torch.nn.ModuleList(
            [seqpar.RingAttention(comm), seqpar.UlyssesAttention(comm, check_ranks=True)]
        )
        twin = copy.deepcopy(model)
        assert twin[0]._bound is model[0]._bound is seqpar.RingAttention(comm)._bound
        assert "rank=0, ranks=1, check_ranks=True" in repr(model[1])

    virtual(1, build)


def test_options_are_checked():
    comm = seqpar.comm.messages.comm.Comm("silent", 0, 4)
    for make, message in [
        (
            lambda: seqpar.TokenRingAttention(comm, partial_dtype=torch.uint8),
            "partial_dtype must be None or one of",
        ),
        (
            lambda: seqpar.UlyssesAttention(comm, head_groups=0),
            "head_groups must be at least 1, got 0",
        ),
        (
            lambda: seqpar.DisaggregatedAttention(comm, plan=3),
            "plan must be None, Tasks, or a function, got 3",
        ),
        (
            lambda: seqpar.DisaggregatedAttention(comm, keep="heads"),
            'keep must be "home" or "server", got \'heads\'',
        ),
        (
            lambda: seqpar.DisaggregatedAttention(comm, backward_plan="home"),
            "backward_plan must be None, Tasks, or a function, got 'home'",
        ),
        (
            lambda: seqpar.DisaggregatedAttention(comm, backward_plan=at_home, keep="server"),
            'backward_plan must be None with keep="server"',
        ),
        (
            lambda: seqpar.DisaggregatedAttention(comm, tolerance=-0.1),
            "tolerance must be finite and above 0, got -0.1",
        ),
        (
            lambda: seqpar.USPAttention(comm),
            r"mesh must have 2 dimensions, got one of shape \(4,\)",
        ),
        (
            lambda: seqpar.MeshAttention(comm),
            r"mesh must have 2 dimensions, got one of shape \(4,\)",
        ),
        (
            lambda: seqpar.USPAttention(comm, outer="ulysses"),
            "outer must be one of .*'mesh', 'ring', 'token_ring'\\], got 'ulysses'",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


def other_strategies(comm):
    """Rank 0 has tasks in a plan, which the other's strategy does not know."""
    attn = module(["disaggregated+at random", "ring"][comm.rank], comm, check_ranks=True)
    q, k, v = (torch.zeros(12, heads, 8) for heads in (2, 1, 1))
    with pytest.raises(ValueError, match="must be the same on all ranks: rank 0 has") as caught:
        attn(q, k, v, LAYOUT, causal=True)
    return str(caught.value)


def test_ranks_with_other_strategies_all_raise_the_same():
    assert len(set(virtual(2, other_strategies))) == 1
