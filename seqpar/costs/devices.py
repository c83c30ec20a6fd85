"""Devices and nodes of preset clusters, with the source of each figure.

The rates of devices, memories and links come from NVIDIA's data sheets "H100 Tensor Core GPU",
"H200 Tensor Core GPU" and "A100 Tensor Core GPU" (80 GB SXM). An A800 is an A100 whose NVLink has
400 GB/s in both directions together, and an H800 is an H100 with the same NVLink. Programs do not
reach these rates. The costs therefore use a fraction of each rate:

* Links: 65% of NVLink with a latency of 10 µs, and 90% of InfiniBand with a latency of 20 µs. These
  numbers are from calculon-ai/calculon, systems/a100_80g.json. PCIe is also assumed to reach 90%.
* Linear modules: 50% of the rate of matrix products, as in the paper on DistCA.
* Linear attention: 90% of the memory bandwidth. A copy on an H200 reached 4.3 of 4.8 TB/s.

Devices whose names end in "_fa4" have the rates of FlashAttention-4 that were measured on an H200
(benchmarks/results/nvidia-h200/quick.txt). An H100 is assumed to have the same rates, because it
has the same multiprocessors and clock rates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from seqpar.costs.device import Device, Link, Recurrent
from seqpar.costs.grid import Floats, Grid

NVLINK_EFFICIENCY = 0.65
INFINIBAND_EFFICIENCY = 0.9
PCIE_EFFICIENCY = 0.9
MATMUL_EFFICIENCY = 0.5
MEMORY_EFFICIENCY = 0.9

# From DistCA's profile of an H100: number of tokens -> seconds of a causal forward, with 64 heads
# and D = 128.
H100_CAUSAL = {128: 0.030e-3, 1024: 0.133e-3, 8192: 3.71e-3, 65536: 206e-3}
HEADS, HEAD_DIM, TILE_ROWS = 64, 128, 128
MULTIPROCESSORS = 132
H100_FLOPS_PER_SECOND = 341e12  # FLOP/s of the forward with 65,536 tokens
# FlashAttention-2's paper states 50 to 73% of an A100's 312 TFLOP/s; 0.615 is the middle.
A100_FLOPS_PER_SECOND = 0.615 * 312e12
# A backward has 2.5 times the FLOPs of a forward. The rates are those of FlashAttention-2 on an
# H100 with D = 128, from FlashAttention-3's paper: 298 to 335 TFLOP/s in a causal forward, and 291
# to 322 TFLOP/s in its backward.
BACKWARD_TO_FORWARD_SECONDS = 2.5 * (298 + 335) / (291 + 322)
# The FLOP/s of FlashAttention-4's kernels (4.0.0b36) on an H200, in one step of Ring over 16,384
# tokens, with 32 query heads and 8 KV heads of 128. The backward is not deterministic.
FLASH_ATTENTION_4_FLOPS_PER_SECOND = 742e12
FLASH_ATTENTION_4_BACKWARD_TO_FORWARD = 2.5 * 742 / 672


def published_grid(
    rate: float = H100_FLOPS_PER_SECOND, to_forward: float = BACKWARD_TO_FORWARD_SECONDS
) -> Grid:
    """Return a grid made from four published times of an H100, scaled to `rate` FLOP/s for large
    calls.

    A grid is a table of the seconds of attention calls of different sizes. `to_forward` is the
    seconds of backward divided by the seconds of forward.

    The four published times are points of the grid. The times at all other points are computed from
    three constants: the seconds per call, per row and per (query, key) pair. These constants
    reproduce the four published times with an error of at most 0.5%. A kernel divides the rows of
    each head into tiles. If a call has fewer tiles than the GPU has multiprocessors, it is assumed
    to take as long as a call with one tile for each multiprocessor. The mask of a causal call hides
    a part of some tiles, and the kernel computes these tiles as a whole. The published times
    include this additional work, so the grid's `edge`, which would add it, is 0. A window adds half
    a tile of keys per row.
    """
    rows, times = np.array([*H100_CAUSAL], np.float64), np.array([*H100_CAUSAL.values()])
    seen = (rows + 1) / 2  # the average number of keys per row

    def terms(rows: Floats, seen: Floats) -> Floats:
        pairs = np.maximum(rows, MULTIPROCESSORS / HEADS * TILE_ROWS) * seen
        return np.stack([np.ones_like(pairs), rows + 0 * seen, pairs], -1)

    relative_terms = terms(rows, seen) / times[:, None]
    constants = np.linalg.lstsq(relative_terms, np.ones(times.size), rcond=None)[0]
    call, slower = float(constants[0]), H100_FLOPS_PER_SECOND / rate
    full, window = (terms(rows[:, None], seen + keys) @ constants for keys in (0, TILE_ROWS / 2))
    np.fill_diagonal(full, times)
    full, window = (call + (table - call) * slower for table in (full, window))
    tables = full, to_forward * full, window, to_forward * window
    calls = call, to_forward * call
    return Grid(rows, seen, *tables, HEADS, HEAD_DIM, calls, edge=0.0, tile=TILE_ROWS, fused=True)


def memory_bound(bandwidth: float) -> Recurrent:
    """Return the costs of linear attention that is limited by memory bandwidth, such as lightning
    attention.

    In bf16 with D = 128, a forward reads and writes 1,536 bytes per token and head: one pass reads
    keys and values, and a second pass reads all operands. A backward has four passes and reads and
    writes 3,584 bytes.
    """
    call, rate = published_grid().call, MEMORY_EFFICIENCY * bandwidth
    return Recurrent(call, (0.0, 0.0), (1536 / rate, 3584 / rate), 128)


def gpu(name: str, memory: float, rate: float, bandwidth: float, attention: float) -> Device:
    """Return a GPU from the figures of its data sheet and the largest FLOP/s of attention."""
    grid, recurrent = published_grid(attention), memory_bound(bandwidth)
    return Device(name, memory, rate, MATMUL_EFFICIENCY, bandwidth, "bfloat16", grid, recurrent)


def core() -> Device:
    """Return one core of a server's CPU, for machines that were not measured.

    The figures are rounded values of a core with AVX-512 in fp32. The figures suffice to rank
    strategies, but not to predict seconds.
    """
    rows = keys = np.array([64.0, 512.0, 4096.0])
    heads, dim, rate = 8, 64, 30e9
    full = 2e-4 + rows[:, None] * keys * heads * 4 * dim / rate
    tables = full, BACKWARD_TO_FORWARD_SECONDS * full, full, BACKWARD_TO_FORWARD_SECONDS * full
    grid = Grid(rows, keys, *tables, heads, dim, (2e-4, 4e-4), edge=128.0, tile=1, fused=False)
    recurrent = Recurrent((1e-3, 2e-3), (0.0, 0.0), (1e-6, 2.5e-6), dim)
    rates = 60e9, MATMUL_EFFICIENCY, 8e9
    return Device("core", 4e9, *rates, "float32", grid, recurrent, operator=5e-6)


class NodeKind(NamedTuple):
    """A node of 8 GPUs, with the nominal rates of its links in bytes per second and direction."""

    device: Device
    nvlink: float
    nics: int
    nic: float
    pcie: float

    @property
    def links(self) -> tuple[Link, Link, Link]:
        """The links inside a node, between nodes and to the host, with the rates that programs
        reach.
        """
        return (
            Link(10e-6, self.nvlink * NVLINK_EFFICIENCY),
            Link(20e-6, self.nic * INFINIBAND_EFFICIENCY),
            Link(10e-6, self.pcie * PCIE_EFFICIENCY),
        )


_H100 = gpu("H100", 80e9, 989.4e12, 3.35e12, H100_FLOPS_PER_SECOND)
_A100 = gpu("A100", 80e9, 312e12, 2.039e12, A100_FLOPS_PER_SECOND)
_H200 = gpu("H200", 141e9, 989.4e12, 4.8e12, H100_FLOPS_PER_SECOND)
_FLASH_ATTENTION_4 = published_grid(
    FLASH_ATTENTION_4_FLOPS_PER_SECOND, FLASH_ATTENTION_4_BACKWARD_TO_FORWARD
)

# Device -> the same device with the rates of FlashAttention-4.
WITH_FLASH_ATTENTION_4 = {"h100": "h100_fa4", "h200": "h200_fa4"}
# A DGX H100 has 8 NICs of 400 Gbit/s, and a DGX A100 has 8 NICs of 200 Gbit/s. The NICs of nodes
# with A800, H800 and H200 are those of the clusters in Zeppelin's evaluation.
NODES = {
    "h100": NodeKind(_H100, 450e9, 8, 50e9, 64e9),
    "h200": NodeKind(_H200, 450e9, 8, 50e9, 64e9),
    "h100_fa4": NodeKind(replace(_H100, attention=_FLASH_ATTENTION_4), 450e9, 8, 50e9, 64e9),
    "h200_fa4": NodeKind(replace(_H200, attention=_FLASH_ATTENTION_4), 450e9, 8, 50e9, 64e9),
    "h800": NodeKind(replace(_H100, name="H800"), 200e9, 8, 50e9, 64e9),
    "a100": NodeKind(_A100, 300e9, 8, 25e9, 32e9),
    "a800": NodeKind(replace(_A100, name="A800"), 200e9, 4, 25e9, 32e9),
}


def node_like(device: object) -> NodeKind:
    """Return the kind of node for a GPU's name. If the name contains no known device, this is a
    node of H100s.
    """
    named = [kind for kind in NODES if kind in str(device).lower()]
    return NODES[named[0] if named else "h100"]
