"""Train LASP-2H's hybrid model: of four layers, three use linear and one uses softmax attention.

Train on 2 processes:
    torchrun --nproc-per-node 2 examples/train_hybrid.py --transport scan
Train on 1 and on 2 processes, and compare with plain PyTorch:
    python examples/train_hybrid.py --compare

Linear and softmax layers use the same layout. Text, batches, labels and loss are the same as in
`train_lm.py`. For linear layers, ranks send states, whose size does not depend on the number of
tokens. --attention is the strategy of the softmax layers. With --linear gated_delta, linear layers
are Gated DeltaNets, as in Qwen3-Next.
"""

import argparse
from functools import partial

import torch
import torch.distributed as dist
from faults import FAULTS, LINEAR_FAULTS
from hybrid import Hybrid, gated_delta_by_document, linear_by_document
from model import Attend
from options import arguments, parse
from torch import Tensor
from train_lm import Plans, Trainer, run

import seqpar


class HybridTrainer(Trainer):
    """A trainer for a model with both kinds of attention."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        super().__init__(options, device)
        self.linear, self.kind = None, options.linear
        self.exact = options.linear == "gated_delta" and options.report is not None
        if self.attention is not None:
            group = dist.group.WORLD
            self.linear = seqpar.RecurrentAttention(group, self.kind, options.transport)

    def make_model(self, options: argparse.Namespace) -> Hybrid:
        return Hybrid(
            options.layers,
            options.softmax_every,
            options.norm == "simple_rms",
            options.gate == "on",
            options.linear,
        )

    def attend(self, layout: seqpar.Layout) -> Attend:
        softmax = super().attend(layout)
        if self.linear is None:
            plain = {"constant_decay": linear_by_document, "gated_delta": gated_delta_by_document}
            linear = partial(plain[self.kind], cu_seqlens=layout.cu_seqlens.tolist())
        else:
            linear = partial(self.linear, layout=layout)
            if self.exact:
                linear = in_fp64(linear)

        def attend(q: Tensor, k: Tensor, v: Tensor, **gates: Tensor) -> Tensor:
            return linear(q, k, v, **gates) if gates else softmax(q, k, v)

        return attend

    def sent_bytes(self) -> int:
        """Return the bytes that this rank has sent for attention of both kinds so far.

        All modules on a group have one count; modules on a mesh have a separate count.
        """
        if self.linear is None:
            return 0
        on_mesh = isinstance(self.attention, seqpar.MeshAttention | seqpar.USPAttention)
        return self.linear.sent_bytes + (self.attention.sent_bytes if on_mesh else 0)


def in_fp64(attend: Attend) -> Attend:
    """Return attention that computes in fp64, like the plain recurrence with which it is compared.

    In fp32, correct gradients differ by 1e-6. AdamW divides a gradient by its size, so a gradient
    that is mostly rounding error becomes a full step. After 13 steps of 300 tokens, losses would
    differ by 1e-5.
    """

    def exact(q: Tensor, k: Tensor, v: Tensor, **gates: Tensor) -> Tensor:
        gates = {name: x.double() for name, x in gates.items()}
        return attend(q.double(), k.double(), v.double(), **gates).to(q.dtype)

    return exact


def main() -> None:
    attention_help = "the softmax layers' strategy; sdpa: all layers in plain PyTorch"
    parser = arguments(__doc__, {**FAULTS, **LINEAR_FAULTS}, "all_gather", attention_help)
    parser.add_argument(
        "--transport",
        choices=["all_gather", "scan", "tree"],
        default="all_gather",
        help="how states are sent",
    )
    parser.add_argument(
        "--linear",
        choices=["constant_decay", "gated_delta"],
        default="constant_decay",
        help="the kind of the linear layers",
    )
    parser.add_argument("--layers", type=int, default=4, help="number of layers")
    parser.add_argument(
        "--softmax-every",
        type=int,
        default=4,
        help="one in this number of layers uses softmax attention",
    )
    parser.add_argument(
        "--norm",
        choices=["simple_rms", "none"],
        default="simple_rms",
        help="norm of linear attention's output",
    )
    parser.add_argument(
        "--gate", choices=["on", "off"], default="on", help="gate on linear attention's output"
    )
    architecture = ["layers", "softmax_every"]
    parser.get_default("passed_on").extend([*architecture, "transport", "linear", "norm", "gate"])
    options = parse(parser, positive=architecture)
    plans: Plans = {"1 process, plain PyTorch": ("sdpa", 1, 1)}
    if not options.inject_fault:
        plans[f"{options.attention}, 1 process"] = (options.attention, 1, 1)
    plans[f"{options.attention}, {options.processes} processes"] = (
        options.attention,
        options.processes,
        1,
    )
    run(options, HybridTrainer, plans)


if __name__ == "__main__":
    main()
