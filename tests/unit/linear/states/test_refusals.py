"""What linear attention refuses, by name, before anything is sent."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from seqpar import LASP2Attention, Layout, use_backend
from seqpar.comm.messages.comm import Comm
from seqpar.linear.states import state_options

LAYOUT = Layout.zigzag([0, 10, 24], 2)


REFUSALS = [
    (
        {"q": (11, 2, 8)},
        "q must have the 12 tokens its layout gives this rank, got 11 in .* \\(rank 0 of 2\\)",
    ),
    ({"k": (12, 1, 4)}, "k must have q's head dim, 8, got 4"),
    (
        {"q": (12, 3, 8), "k": (12, 2, 8), "v": (12, 2, 8)},
        "q must have a multiple of k's 2 heads, got 3",
    ),
    ({"layout": Layout.zigzag(36, 3)}, "layout must be for the group's 2 ranks, got one for 3"),
    ({"layout": 5}, "layout must be a seqpar.Layout, got int"),
    (
        {"layout": Layout.striped(24, 2, 1)},
        "layout must have spans of at least 4 tokens.* got 12 spans of 1 tokens in document 0",
    ),
    ({"causal": 1}, "causal must be True or False, got 1"),
    ({"causal": False, "log_decay": torch.zeros(1)}, "log_decay must be None with causal=False"),
    (
        {"log_decay": torch.zeros(2)},
        "log_decay must be \\(1,\\), one per KV head, in fp32 or fp64, got \\(2,\\)",
    ),
    ({"log_decay": torch.zeros(1).half()}, "log_decay must be .* got \\(1,\\) of torch.float16"),
    ({"log_decay": torch.tensor([0.5])}, "log_decay must be finite and at most 0, got \\[0.5\\]"),
    ({"log_decay": torch.tensor([-torch.inf])}, "log_decay must be finite and at most 0"),
    ({"log_decay": torch.tensor([torch.nan])}, "log_decay must be finite and at most 0"),
    ({"log_decay": torch.zeros(1, requires_grad=True)}, "log_decay must not require a gradient"),
    (
        {"log_decay": torch.zeros(1, device="meta")},
        "log_decay must be on q's device, cpu, or the CPU, got meta",
    ),
    ({"log_decay": -0.1}, "log_decay must be a tensor, got float"),
    (
        {"initial_state": torch.zeros(2, 1, 8, 8, device="meta")},
        "initial_state must be on q's device, cpu, got meta",
    ),
    ({"initial_state": 0}, "initial_state must be a tensor, got int"),
    ({"k": torch.zeros(12, 1, 8, device="meta")}, "k must be on q's device, cpu, got meta"),
    ({"v": torch.zeros(12, 1, 8, device="meta")}, "v must be on q's device, cpu, got meta"),
    ({"scale": float("inf")}, "scale must be finite, at most 3.4e\\+38, got inf"),
    ({"scale": -1e39}, "scale must be finite, at most 3.4e\\+38, got -1e\\+39"),
    ({"scale": "1"}, "scale must be a number, got '1'"),
    ({"scale": torch.ones(3)}, r"scale must be a number, or a float tensor \(\) or \(2,\), one"),
    (
        {"initial_state": torch.zeros(2, 1, 8)},
        "initial_state must be \\(documents, Hkv, D, Dv\\), got \\(2, 1, 8\\)",
    ),
    ({"initial_state": torch.zeros(3, 1, 8, 8)}, "initial_state must be \\(2, 1, 1, 8, 8\\)"),
    (
        {"initial_state": torch.zeros(2, 1, 8, 8).half()},
        "initial_state must be .* of torch.float32, got",
    ),
    (
        {"backend": "triton"} | {name: torch.zeros(12, 1, 8).bfloat16() for name in "qkv"},
        r"q must be fp16 or fp32 .* in Triton's interpreter .* got torch.bfloat16: cast",
    ),
    (
        {"backend": "flash_attn"},
        r"backend must be one of \['aten', 'reference', 'triton'\], got 'flash_attn'",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_refusals_name_the_argument_and_send_nothing(change, message):
    comm = Comm("silent", 0, 2)  # whose exchange would fail: it has no group
    change = dict(change)
    lin = LASP2Attention(comm, transport=change.pop("transport", "all_gather"))
    call = {"q": (12, 2, 8), "k": (12, 1, 8), "v": (12, 1, 8), "layout": LAYOUT}
    assert (
        lin.unsupported(
            **{name: torch.zeros(x) if name in "qkv" else x for name, x in call.items()}
        )
        is None
    )
    with use_backend(change.pop("backend", "aten")):
        call |= change
        call |= {name: torch.zeros(call[name]) for name in "qkv" if isinstance(call[name], tuple)}
        with pytest.raises(ValueError, match=message):
            lin(**call)
        assert lin.unsupported(**call) is not None
    assert comm.sent_messages == 0


def test_modules_are_checked():
    comm = Comm("silent", 0, 2)
    with pytest.raises(ValueError, match="transport must be one of all_gather, scan, got 'ring'"):
        LASP2Attention(comm, transport="ring")
    with pytest.raises(ValueError, match="blocks must be at least 1, got 0"):
        LASP2Attention(comm, transport="scan", blocks=0)
    with pytest.raises(ValueError, match="group must be a process group"):
        LASP2Attention(None)
    mesh = Comm("mesh", 0, 4)
    mesh.shape = (2, 2)
    with pytest.raises(ValueError, match="group must have 1 dimension"):
        LASP2Attention(mesh)


def test_a_decay_that_was_written_to_is_checked_again():
    lin, x, layout = LASP2Attention(Comm("alone", 0, 1)), torch.zeros(4, 2, 8), Layout.zigzag(4, 1)
    decay = torch.full((2,), -0.5)
    for _ in range(2):
        lin(x, x, x, layout, log_decay=decay)
    decay.fill_(0.5)
    with pytest.raises(ValueError, match="log_decay must"):
        lin(x, x, x, layout, log_decay=decay)


def test_no_fake_decay_is_kept():
    decay = torch.tensor([-0.625])
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match="log_decay"):
        state_options.constant_on(decay, decay.device)
    assert state_options.constant_on(decay, decay.device).tolist() == [-0.625]
