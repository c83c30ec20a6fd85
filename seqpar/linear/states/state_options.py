"""The formulas and the options of calls in which ranks exchange states.

A *span* is a range of consecutive tokens of a document on one rank. Row i of a span, counted from
0, has the output

    out_i = scale · q_i · (Σ_{j≤i} λ^{i−j} k_jᵀ v_j + λ^{i+1} S)

where S is the state that enters the span, and λ = exp(log_decay) is a number for each KV head.
Later tokens of the document need only the state of the span's L rows, which is Σ_j λ^{L−1−j} k_jᵀ
v_j. The combined state of two consecutive spans is λ^{L₂} S₁ + S₂. Spans can be combined in any
grouping.

B is the batch, T the number of rows, Hq the number of query heads, Hkv the number of KV heads, D
the head dim of q and k, and Dv the head dim of v.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from seqpar.core.device_tables import on_stream
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.memo import Memo
from seqpar.core.torch_private import version_of
from seqpar.linear.attend import NOMINAL_CHUNK, LinearWork, Options, StepName
from seqpar.linear.inputs import Inputs

T = TypeVar("T")

MAX_KEPT_DECAYS = 1024  # each layer of a model may have a different decay
# For each tensor on a GPU, the version in which `check_values` read it.
_right = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class StateOptions(Options[Tensor]):
    family = "linear"
    scale: float  # the factor of q·k
    # If False, nothing decays, and each row attends to its whole document: out_i = scale · q_i · M,
    # where M is the sum of the states of all runs of the document.
    causal: bool
    backend: str
    # (Hkv,) in fp64, on the device of the operands: log λ of each KV head. None means λ = 1.
    log_decay: Tensor | None
    # The weights of states that were computed so far. Calls whose decays came from the CPU share
    # one object if the values are equal. Each other call has a separate object.
    derived: Memo = field(default_factory=Memo, compare=False, repr=False)

    def once(self, device: torch.device, plan: object, compute: Callable[[StateOptions], T]) -> T:
        """Return `compute(self)`, the weights of the sums in a plan, on a device.

        The weights are stored, so that `compute` is called only once for each stream of the device.
        """
        return on_stream(device, self.derived, (plan,), lambda: compute(self))

    def on_meta(self) -> StateOptions:
        log_decay = self.log_decay
        if log_decay is not None:
            log_decay = torch.empty_like(log_decay, device="meta")
        return replace(self, log_decay=log_decay, derived=Memo())

    def power(self, exponents: Tensor, heads: int) -> Tensor:
        """Return λ^exponent, (…, Hkv) in fp64, and 0 for negative exponents."""
        if self.log_decay is None:
            return (exponents >= 0).double()[..., None].expand(*exponents.shape, heads)
        powers = torch.exp(exponents[..., None] * self.log_decay)
        return powers.masked_fill((exponents < 0)[..., None], 0.0)

    def empty(self, inputs: Inputs, count: int) -> Tensor:
        dtype = accumulator_dtype(inputs.q.dtype)
        return inputs.q.new_zeros((count, *inputs.state_shape), dtype=dtype)

    def work(self, inputs: Inputs, backward: bool, *steps: StepName) -> LinearWork:
        """Return the work of one or more steps of a forward or backward."""
        batch, rows, heads, dim = inputs.q.shape
        value_dim = inputs.v.shape[3]
        with_states = batch * rows * heads * dim * value_dim // (dim + value_dim)
        within = batch * rows * heads * NOMINAL_CHUNK * (5 if backward else 2) // 2
        areas = {
            "begin": with_states,
            "local": within + with_states * (2 if backward else 0),
            "finish": with_states * (2 if backward else 1),
        }
        area = sum(areas[step] for step in steps)
        share = area / max(1, sum(areas.values()))
        return LinearWork(area, share, batch * rows, inputs.heads, (dim, value_dim), backward)


def check_values(log_decay: Tensor) -> None:
    """Raise a ValueError unless all values are finite and at most 0.

    To read values from a GPU, the host must wait for the GPU. A tensor on a GPU is therefore read
    only in the first call with this tensor, and again after it was changed.
    """
    if log_decay.device.type == "cpu":
        _check(*log_decay.tolist())
    elif log_decay.is_inference():  # a tensor of inference mode has no version
        _check(*_read(log_decay))
    elif _right.get(log_decay) != (version := version_of(log_decay)):
        _check(*_read(log_decay))
        _right[log_decay] = version


def constant_on(log_decay: Tensor, device: torch.device) -> Tensor:
    """Return log_decay in fp64 on the device. For a tensor on the CPU, equal values are copied to
    the device only once.
    """
    if log_decay.device.type == "cpu":
        return _copy(device, *log_decay.tolist())
    return log_decay.to(torch.float64).contiguous()


def _read(log_decay: Tensor) -> list[float]:
    return [] if log_decay.is_meta else log_decay.tolist()


@lru_cache(maxsize=MAX_KEPT_DECAYS)
def _check(*values: float) -> None:
    if not all(-math.inf < value <= 0 for value in values):
        raise ValueError(f"log_decay must be finite and at most 0, got {list(values)}")


@lru_cache(maxsize=MAX_KEPT_DECAYS)
def _copy(device: torch.device, *values: float) -> Tensor:
    copied = torch.tensor(values, dtype=torch.float64, device=device)
    # Without this, the cache would give a tensor of inference mode to calls outside this mode.
    if type(copied) is not Tensor:
        found = f"a mode that makes a {type(copied).__name__} of it"
        raise ValueError(f"log_decay on the CPU must be used outside of torch modes, got {found}")
    return copied
