"""Ranks on GPUs compare their kernels once, on gloo's processes whose CPUs pass for GPUs."""

import sys
import types

import pytest
import torch
from seqpar.kernels.gpus import Gpu

from seqpar import Layout
from seqpar.comm.messages.comm import Comm
from seqpar.softmax.backends import aten_cuda, flash_attn
from seqpar.softmax.backends.flash_attn import load_package
from seqpar.softmax.backends.kernel_order import described_kernels
from seqpar.softmax.call import CallArguments
from tests.support import varlen_kernels
from tests.support.cases import module

CUDA = torch.device("cuda", 0)
RANKS = 2


def stand_in():
    """Return a module like FlashAttention-4, in a version that compiles without data."""
    found = types.ModuleType("flash_attn.cute.interface")
    softcap = {
        "create_softcap_scoremod": varlen_kernels.create_softcap_scoremod,
        "create_softcap_scoremod_bwd": varlen_kernels.create_softcap_scoremod_bwd,
    }
    found.utils = types.SimpleNamespace(**softcap)
    found._flash_attn_fwd = varlen_kernels.fa4_forward
    found._flash_attn_bwd = varlen_kernels.fa4_backward
    found.is_fake_mode = None
    return found


def passes(group, strategy, differ):
    """Return the description of this rank's kernels, the texts that ranks compare in each of two
    passes, the bytes that this rank sends, and the bytes that its traffic predicts."""
    comm, compared = Comm.of(group), [[], []]
    comm._equal.clear()
    gather, resolve = Comm.all_gather_text, CallArguments.to_call

    def all_gather_text(self, text, *, label):
        compared[-1].append(label)
        return gather(self, text, label=label)

    def to_call(self, comm, shape, has_sinks, device):
        return resolve(self, comm, shape, has_sinks, CUDA)

    kept = [lambda: None for _ in range(1000 * comm.rank)]  # moves what is allocated later
    load_package.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        if not (differ and comm.rank):
            for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
                patch.setitem(sys.modules, name, stand_in())
        patch.setattr(aten_cuda, "gpu_of", lambda device: Gpu("stand-in", 9, 132))
        patch.setattr(flash_attn, "installed_version", lambda distribution: "4.0.0b36")
        patch.setattr(Comm, "all_gather_text", all_gather_text)
        patch.setattr(CallArguments, "to_call", to_call)
        described = described_kernels(CUDA)
        attn, layout = module(strategy, group), Layout.zigzag(64, RANKS)
        q, k, v = (
            torch.randn(32, heads, 8, dtype=torch.bfloat16, requires_grad=True)
            for heads in (4, 2, 2)
        )
        before = attn.sent_bytes
        out = attn(q, k, v, layout, causal=True)
        compared.insert(0, compared.pop())
        out.sum().backward()
        sent = attn.sent_bytes - before
        traffic = sum(row.bytes for row in attn.traffic(q, k, v, layout, causal=True))
    load_package.cache_clear()
    comm._equal.clear()
    del kept
    return described, compared, sent, traffic


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_equal_kernels_are_compared_once_in_forward(pool, strategy):
    """The traffic assumes equal kernels, and has no bytes of the comparison."""
    found = pool(RANKS, passes, strategy, False)
    assert found[0][0] == found[1][0] and "0x" not in found[0][0]
    for _, compared, sent, traffic in found:
        assert compared == [["kernels of attention"], []]
        assert sent == traffic > 0


def test_ranks_that_lack_a_package_send_fp32(pool):
    """Only the traffic of rank 0 assumes that both ranks have the package."""
    found = pool(RANKS, passes, "ring", True)
    assert all(compared == [["kernels of attention"], []] for _, compared, _, _ in found)
    (_, _, sent, traffic), (_, _, lacking, of_lacking) = found
    assert sent == lacking == of_lacking > traffic
