"""Check that all ranks make the same call of attention.

If two ranks make different calls, all ranks raise the same error, so that no rank waits forever.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from seqpar.comm.messages.comm import Comm
from seqpar.comm.messages.message_header import hint_at, in_words

# An error lists at most this number of ranks. In larger groups, these are rank 0 and ranks that
# differ from rank 0.
_MAX_LISTED = 16
C = TypeVar("C")
Described = dict[str, object]  # the arguments of a call as JSON values, by argument name


class Fault(NamedTuple):
    """The type and the text of the error with which a rank refuses a call.

    An exception object would keep the tensors of its traceback alive. A fault keeps none.
    """

    is_type_error: bool
    text: str

    @classmethod
    def of(cls, error: Exception) -> Fault:
        return cls(isinstance(error, TypeError), str(error))


def attempt(resolve: Callable[[], C]) -> tuple[C, Fault | None]:
    """Return the result of `resolve` and None. If `resolve` raises an error, return None and a
    `Fault`.
    """
    try:
        return resolve(), None
    except (ValueError, TypeError) as error:
        return cast(C, None), Fault.of(error)


def check_on_all_ranks(
    comm: Comm,
    strategy: object,
    resolve: Callable[[], C],
    shared: Callable[[bool], Described],
    hint: str = "",
) -> C:
    call, fault = attempt(resolve)
    compare_calls(comm, strategy, fault, shared, hint)
    return call


def compare_calls(
    comm: Comm,
    strategy: object,
    fault: Fault | None,
    shared: Callable[[bool], Described],
    hint: str = "",
) -> None:
    """Raise the same error on all ranks if two ranks make different calls, or if a rank refuses its
    call.

    Every rank must run this function in every call, even if it has compared an equal call before.
    Each of P ranks sends ⌈log₂ P⌉ messages of 64 bytes, with a digest of the call. If the digests
    differ, ranks exchange descriptions of their calls as text. If some ranks refuse the call, all
    ranks raise the error of the lowest of these ranks. If no rank refuses the call but the texts
    differ, all ranks raise a ValueError that names an argument that differs between ranks.

    Args:
        comm: the ranks.
        strategy: the strategy of the call. `str(strategy)` is compared, and must show all options.
        fault: the error with which this rank refuses the call, or None.
        shared: `shared(True)` returns the arguments that must be the same on all ranks, by argument
            name. `shared(False)` returns a description of the arguments that is computed faster,
            but may differ between ranks even if the arguments are equal.
        hint: a text that is appended to an error about different arguments.
    """
    first: Described = {"fault": fault}  # JSON writes the fault as a list, or as null
    last: Described = {"strategy": str(strategy), "group size": comm.size}
    # The label does not name the strategy, because ranks may call different strategies.
    label = "rank check"
    digest = list(hashlib.sha256(json.dumps(first | shared(False) | last).encode()).digest())
    tensor = torch.tensor([digest, [255 - x for x in digest]], dtype=torch.uint8, device="cpu")
    largest, negated = comm.maximum(tensor.to(comm.device), label=label)
    if not torch.equal(largest, 255 - negated):  # if the largest digest is not also the smallest
        text = json.dumps(first | shared(True) | last)
        texts = comm.all_gather_text(text, label=label)
        _explain([json.loads(of_rank) for of_rank in texts], hint)
    if fault is not None:
        _raise(fault)


def check_same_model(
    comm: Comm,
    weights: Iterable[tuple[str, Tensor]],
    settings: Described,
    cause: str | None = None,
) -> None:
    """Raise a ValueError on all ranks that names the first setting or tensor in which ranks differ.

    Each rank sends the settings as text, and a hash of 64 bits for each tensor. A tensor is not
    compared if it is on the meta device on any rank. `cause` is a text that is appended to the
    error.
    """
    if comm.size == 1:
        return
    named = [(name, x) for name, x in weights if type(x) in (Tensor, torch.nn.Parameter)]
    digests = [digest(x).to(comm.device) for _, x in named]
    numbers = torch.stack(digests).tolist() if digests else []
    own = {
        name: [str(x.dtype), list(x.shape), number]
        for (name, x), number in zip(named, numbers, strict=True)
    }
    described = json.dumps([settings, own], default=lambda x: type(x).__name__)
    texts = comm.all_gather_text(described, label="weights")
    _check_equal([json.loads(text)[0] for text in texts])
    ranks = [json.loads(text)[1] for text in texts]
    for name in ranks[0]:
        values = [described.get(name) for described in ranks]
        if None not in values and any(value != values[0] for value in values):
            other = next(rank for rank, value in enumerate(values) if value != values[0])
            reason = f"{name} is not the same on rank {other} as on rank 0"
            reason += f": {cause}" if cause else ""
            raise ValueError(f"model must have the same weights on all ranks: {reason}")


@torch.no_grad()
def digest(x: Tensor) -> Tensor:
    """Return a hash of the bits of a tensor, as an int64 scalar on the tensor's device."""
    x = torch.view_as_real(x) if x.is_complex() else x
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    bits = x.contiguous().view(-1).view(kind)
    rows = bits[: bits.numel() // 1024 * 1024].view(-1, 1024)
    sums = [
        rows.sum(0, dtype=torch.int64),
        rows.sum(1, dtype=torch.int64),
        bits[rows.numel() :].to(torch.int64),
    ]
    flat = torch.cat(sums)
    weights = torch.arange(1, 2 * flat.numel(), 2, device=x.device) * 6364136223846793005
    return (flat * weights).sum()


def _explain(ranks: list[Described], hint: str) -> None:
    """Raise the error that all ranks raise, given the arguments of all ranks.

    If the arguments are equal although their digests differed, raise nothing.
    """
    for described in ranks:
        if described["fault"]:
            _raise(Fault(*cast(tuple[bool, str], described["fault"])))
    _check_equal(ranks, hint)


def _check_equal(ranks: list[Described], hint: str = "") -> None:
    for name in ranks[0]:
        # `get` returns None if the strategy of a rank has no such argument.
        values = [described.get(name) for described in ranks]
        if any(value != values[0] for value in values):
            chosen: Sequence[int] = range(len(values))
            if len(values) > _MAX_LISTED:
                chosen = [i for i in chosen if values[i] != values[0]]
                chosen = [0, *chosen[: _MAX_LISTED - 1]]
            texts = _in_words(values)
            listed = ", ".join(f"rank {rank} has {texts[rank]}" for rank in chosen)
            end = hint or hint_at([name])
            raise ValueError(f"{name} must be the same on all ranks: {listed}{end}")


def _in_words(values: Sequence[object]) -> list[str]:
    """Return the text of each value for an error.

    If all values are dictionaries, the texts show only the entries that differ between the values.
    """
    parts = [value for value in values if isinstance(value, dict)]
    if len(parts) < len(values):
        return [in_words(value) for value in values]
    names = dict.fromkeys(name for value in parts for name in value if name != "digest")
    differ = [name for name in names if any(x.get(name) != parts[0].get(name) for x in parts)]
    return [in_words({name: x[name] for name in differ or ["digest"] if name in x}) for x in parts]


def _raise(fault: Fault) -> NoReturn:
    raise (TypeError if fault.is_type_error else ValueError)(fault.text)
