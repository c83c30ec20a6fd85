"""What recurrent attention refuses, by name, before anything is sent."""

import pytest
import torch

from seqpar import Layout, RecurrentAttention, use_backend
from seqpar.comm.messages.comm import Comm
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

LAYOUT = Layout.zigzag([0, 10, 24], 2)
HERE = 12  # tokens of rank 0
GOOD = {
    "q": torch.zeros(HERE, 2, 8),
    "k": torch.zeros(HERE, 2, 8),
    "v": torch.zeros(HERE, 4, 6),
    "layout": LAYOUT,
    "log_decay": torch.zeros(HERE, 4),
    "beta": torch.zeros(HERE, 4),
}
REFUSALS = [
    ({"q": torch.zeros(11, 2, 8)}, "q must have the 12 tokens its layout gives this rank, got 11"),
    ({"k": torch.zeros(HERE, 2, 4)}, "k must have q's head dim, 8, got 4"),
    (
        {"k": torch.zeros(HERE, 3, 8)},
        "k must have a number of heads that divides the 4 heads .* got 3",
    ),
    (
        {"v": torch.zeros(HERE, 5, 6)},
        "k must have a number of heads that divides the 5 heads .* got 2",
    ),
    (
        {"q": torch.zeros(HERE, 3, 8)},
        "q must have .* multiple or a divisor of the 4 heads .* got 3",
    ),
    ({"k": torch.zeros(HERE, 2, 8).half()}, "k must be of q's dtype"),
    ({"layout": Layout.zigzag(36, 3)}, "layout must be for the group's 2 ranks, got one for 3"),
    ({"layout": 5}, "layout must be a seqpar.Layout, got int"),
    (
        {"layout": Layout.striped(24, 2, 1)},
        "layout must have spans of at least 8 tokens on average, or at most 4 spans",
    ),
    ({"log_decay": None}, r"log_decay must be a tensor \(B, T_local, H\) for .*'gated_delta'"),
    ({"beta": None}, r"beta must be a tensor \(B, T_local, H\) for the kind 'gated_delta'"),
    ({"kind": "delta"}, "log_decay must be None for the kind 'delta', got one of shape"),
    ({"kind": "scalar_decay"}, "beta must be None for the kind 'scalar_decay', got one of shape"),
    ({"kind": "kda"}, r"log_decay must be \(B, T_local, H, K\), \(1, 12, 4, 8\), of floats, got"),
    ({"log_decay": torch.zeros(HERE, 2)}, r"log_decay must be .*, \(1, 12, 4\), of floats, got"),
    ({"beta": torch.zeros(HERE, 4).int()}, "beta must be .* of floats, got .* of torch.int32"),
    ({"beta": torch.zeros(HERE, 4, device="meta")}, "beta must be on q's device, cpu, got meta"),
    ({"beta": 0.5}, "beta must be a tensor, got float"),
    ({"log_decay": -0.1}, "log_decay must be a tensor, got float"),
    ({"scale": float("inf")}, "scale must be finite, at most 3.4e\\+38, got inf"),
    ({"scale": torch.ones(3)}, r"scale must be a number, or a float tensor \(\) or \(2,\), one"),
    ({"initial_state": torch.zeros(2, 4, 8)}, r"initial_state must be \(documents, H, K, V\), got"),
    (
        {"initial_state": torch.zeros(2, 2, 8, 6)},
        r"initial_state must be \(2, 1, 4, 8, 6\) \(documents, B, H, K, V\) of torch.float32, got",
    ),
    ({"initial_state": torch.zeros(2, 4, 8, 6).double()}, "initial_state must be .* of torch.flo"),
    ({"return_state": 1}, "return_state must be True or False, got 1"),
    ({"backend": "triton"}, "backend must be one of .*, got 'triton'"),
    (
        {"kind": "constant_decay", "beta": None, "log_decay": torch.zeros(4, requires_grad=True)},
        "log_decay must not require a gradient",
    ),
    (
        {"kind": "constant_decay", "log_decay": torch.zeros(4)},
        "beta must be None for the kind 'constant_decay'",
    ),
    ({"kind": "linear", "beta": None}, "log_decay must be None for the kind 'linear'"),
]


@few_rows(pairs=False)
@pytest.mark.parametrize("transport", ["all_gather", "tree"])
@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_refusals_name_the_argument_and_send_nothing(change, message, transport):
    comm = Comm("silent", 0, 2)  # whose exchange would fail: it has no group
    change = dict(change)
    rec = RecurrentAttention(comm, change.pop("kind", "gated_delta"), transport)
    with use_backend(change.pop("backend", "reference")):
        call = GOOD | change
        with pytest.raises(ValueError, match=message):
            rec(**call)
        assert rec.unsupported(**call) is not None
    assert comm.sent_messages == 0


def test_the_good_call_is_supported():
    with use_backend("reference"):
        assert RecurrentAttention(Comm("silent", 0, 2), "gated_delta").unsupported(**GOOD) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "mamba"}, r"kind must be one of \['linear', .*'kda'\], got 'mamba'"),
        ({"kind": "kda", "transport": "ring"}, "transport must be one of all_gather, scan, tree"),
        ({"kind": "kda", "blocks": 0}, "blocks must be at least 1, got 0"),
        ({"kind": "linear", "blocks": 0}, "blocks must be at least 1, got 0"),
        ({"kind": "kda", "check_ranks": 1}, "check_ranks must be True or False, got 1"),
        ({"kind": "kda", "routing": 1}, "routing must be a seqpar.Routing or None, got 1"),
        ({"kind": "kda", "group": None}, "group must be a process group"),
    ],
)
def test_modules_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        RecurrentAttention(**{"group": Comm("silent", 0, 2)} | arguments)


@pytest.mark.parametrize("transport", ["all_gather", "tree"])
def test_constant_decays_that_differ_between_ranks_are_refused(transport):
    def on_rank(comm):
        rec = RecurrentAttention(comm, "constant_decay", transport, check_ranks=True)
        x = torch.zeros(LAYOUT.tokens_on(comm.rank), 2, 8)
        log_decay = torch.tensor([-0.5, -0.25 * (comm.rank + 1)])
        with pytest.raises(ValueError, match="log_decay must be the same on all ranks") as raised:
            rec(x, x, x, LAYOUT, log_decay=log_decay)
        return str(raised.value)

    first, second = virtual(2, on_rank)
    assert first == second and "rank 1 has [-0.5, -0.5]" in first
