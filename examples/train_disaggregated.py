"""Train a byte-level language model with attention servers that leave and join.

Train with two trainers and two servers; kill one server while another joins:
    python examples/train_disaggregated.py
Also train without killing a server, and check that all losses are equal, bit for bit:
    python examples/train_disaggregated.py --compare
Run only the trainers, with servers that you have started (python -m seqpar serve --bind ADDRESS):
    torchrun --nproc-per-node 2 examples/train_disaggregated.py --servers ipc://${XDG_RUNTIME_DIR:?}/attention-0

Trainers are data parallel: each trainer has its own documents, and DDP averages gradients. Trainers
cut attention into tasks and send them to servers. Tasks do not depend on the servers that compute
them, so servers that die, hang, leave or join change only the speed. `server_processes.py` starts
all processes and shows their work.
"""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from data import batches, documents, standard_library
from model import Transformer
from torch.nn.parallel import DistributedDataParallel

import seqpar

LEARNING_RATE = 1e-3


def train(options: argparse.Namespace) -> None:
    """Run one trainer, which prints a line of JSON for each step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = documents(options.text)[rank::ranks]
    if not own:
        raise SystemExit(f"--text must have at least {ranks} files, one per trainer")
    torch.manual_seed(0)  # the same parameters on every trainer
    model = DistributedDataParallel(Transformer())
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    with seqpar.ServerPool.connect(options.servers) as pool:
        attention = seqpar.DisaggregatedAttention(pool)  # a pool instead of a group
        for step, (ids, cu_seqlens) in enumerate(batches(own, options.tokens), 1):
            start = time.perf_counter()
            layout = seqpar.Layout.contiguous(cu_seqlens, 1)
            attend = partial(attention, layout=layout, causal=True)
            labels = seqpar.shift_labels(ids, cu_seqlens)
            sums = torch.tensor([0.0, (labels >= 0).sum()], dtype=torch.float64)
            dist.all_reduce(sums[1:])  # the number of labels of all trainers
            logits = model(ids, layout.position_ids(0), attend)
            loss = F.cross_entropy(logits, labels, reduction="sum") / sums[1]
            optimizer.zero_grad()
            (loss * ranks).backward()  # DDP averages, and the loss is a sum over trainers
            optimizer.step()
            sums[0] = loss.detach()
            dist.all_reduce(sums[:1])
            tasks = {server.address: server.tasks for server in pool.report().servers}
            seconds = time.perf_counter() - start
            line = {"trainer": rank, "step": step, "loss": sums[0].item(), "seconds": seconds}
            text = json.dumps(line | {"tasks": tasks})
            print(f"{text}\n", end="", flush=True)  # one write, because trainers share the output
            if step == options.steps // 2 and options.joins:
                wait_for(pool, options.joins)
            if step == options.steps:
                break
    dist.barrier()  # leave together: gloo may abort a process after its peers have left
    dist.destroy_process_group()


def wait_for(pool: seqpar.ServerPool, address: str, seconds: float = 60.0) -> None:
    """Wait until a server is ready, so that it takes part in a short training too."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if any(x.address == address and x.state == "ready" for x in pool.report().servers):
            return
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", help="addresses for ServerPool.connect")
    parser.add_argument("--joins", help="a server to wait for after half of the steps")
    parser.add_argument("--steps", type=int, default=40, help="training steps")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per trainer and step")
    parser.add_argument(
        "--text", type=Path, default=standard_library(), help="a folder of files to train on"
    )
    parser.add_argument("--trainers", type=int, default=2, help="the number of trainers to start")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="first train without killing a server, and compare all losses",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="with --compare: folder for loss curves"
    )
    options = parser.parse_args()
    for name in ("steps", "tokens", "trainers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.servers:
        train(options)
    else:
        from server_processes import demonstrate

        sys.exit(demonstrate(options))


if __name__ == "__main__":
    main()
