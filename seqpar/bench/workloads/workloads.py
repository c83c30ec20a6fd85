"""The workloads of a sweep, made from the options of the command."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from seqpar.bench.workloads import contenders, sweep_batches
from seqpar.comm.launch import LaunchedProcess
from seqpar.core.arguments import as_int, shown
from seqpar.core.options import DTYPES, MAX_LENGTH, read_lengths
from seqpar.costs.profile.machine import devices
from seqpar.strategies.registry import SOFTMAX, attention_modules

PASSES = ("forward", "forward+backward")
SCALINGS = ("strong", "weak", "both")
_PUBLISHED: dict[str, object] = {"heads": ["64:8x128"], "dtype": "bf16", "passes": list(PASSES)}
PRESETS: dict[str, dict[str, object]] = {
    # LongCA-bench, arXiv 2510.17896: 8K tokens per device, short documents from the Pile, longer
    # documents from ProLong.
    "longca": _PUBLISHED
    | {
        "masks": [
            *("full", "causal", "full-window", "window", "prefix", "full-pile", "causal-pile"),
            *("full-prolong64k", "causal-prolong64k", "full-prolong512k", "causal-prolong512k"),
            "prefix-pile",
        ],
        "scaling": "weak",
    },
    # MagiAttention's benchmark, which limits documents to a quarter of the batch.
    "magi": _PUBLISHED
    | {
        "masks": ["full", "causal", "full-magi", "causal-magi", "window", "window-magi"],
        "scaling": "weak",
    },
}
WorkloadFields = dict[str, Any]  # a `Workload` in JSON


@dataclass(frozen=True)
class Workload:
    """A call of attention, and the number of ranks that compute the call."""

    ranks: int
    tokens: int  # the length of the whole batch
    heads: int
    kv_heads: int
    head_dim: int
    mask: str  # the name of a batch (`sweep_batches.py`)
    dtype: str  # a name in `core.options.DTYPES`
    passes: str  # "forward" or "forward+backward"

    def __str__(self) -> str:
        heads = f"{self.heads}:{self.kv_heads}x{self.head_dim}"
        ranks = f"{self.ranks} rank{'s' * (self.ranks != 1)}"
        return f"{self.tokens:,} tokens, {heads}, {self.mask}, {self.dtype}, {self.passes}, {ranks}"

    @property
    def backward(self) -> bool:
        return self.passes == PASSES[1]

    def flops(self, area: int) -> int:
        """Return the FLOPs: two multiply-adds per pair, head and dim in forward, and five in
        backward.
        """
        return area * self.heads * self.head_dim * 2 * (7 if self.backward else 2)

    def as_dict(self) -> WorkloadFields:
        return asdict(self)


MAX_TOKENS_CHECKED = 2048  # limited by the tokens² scores of the fp64 reference


@dataclass(frozen=True)
class SweepOptions:
    """The options of a sweep, which determine which batches and strategies are measured."""

    device: str
    contenders: tuple[str, ...]  # strategies, then other libraries
    lengths: tuple[int, ...]
    scaling: str
    heads: tuple[str, ...]
    masks: tuple[str, ...]
    ranks: tuple[int, ...]
    dtype: str
    passes: tuple[str, ...]
    rounds: int  # the number of timed steps of each contender
    limit: float  # the largest number of seconds of a contender on a workload

    @classmethod
    def of(cls, given: dict[str, Any], where: LaunchedProcess | None) -> SweepOptions:
        preset = _preset(given)
        device = given["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
        gpu = device == "cuda"
        defaults: dict[str, Any] = {
            "lengths": ["32768", "131072"] if gpu else ["4096", "8192"],
            "heads": ["32:8x128"] if gpu else ["8:8x64"],
            "masks": ["causal"],
            "dtype": "bf16" if gpu else "fp32",
            "passes": [PASSES[1]],
            "scaling": "strong",
        }
        if preset:
            defaults["lengths"] = ["8192"]  # per rank
        chosen = defaults | preset
        chosen |= {name: value for name, value in given.items() if value is not None}
        most = _processes(device, where)
        made = cls(
            device=device,
            contenders=_contenders(given["strategies"], given["peers"]),
            lengths=_lengths(chosen["lengths"]),
            scaling=_one("scaling", chosen["scaling"], SCALINGS),
            heads=_each("heads", chosen["heads"]),
            masks=_each("masks", chosen["masks"]),
            ranks=_ranks(given["ranks"], most, where, device),
            dtype=_one("dtype", chosen["dtype"], DTYPES),
            passes=tuple(_one("passes", x, PASSES) for x in _each("passes", chosen["passes"])),
            rounds=as_int("rounds", given["rounds"], 1, 10_000),
            limit=given["limit"],
        )
        for shape in made.heads:
            heads_of(shape)
        for mask in made.masks:
            sweep_batches.parse(mask)
        made.workloads()
        return made

    def workloads(self) -> list[Workload]:
        """Return all workloads, sorted by ranks, because processes restart when the number of ranks
        changes.
        """
        # A dict, because strong and weak scaling have points in common.
        workloads: dict[Workload, None] = {}
        lengths = [
            (ranks, length * (ranks if scaling == "weak" else 1))
            for ranks, scaling, length in itertools.product(
                sorted(self.ranks), SCALINGS[:2], self.lengths
            )
            if self.scaling in (scaling, "both")
        ]
        shapes = itertools.product(self.heads, self.masks, self.passes)
        for (ranks, tokens), (heads, mask, passes) in itertools.product(lengths, [*shapes]):
            if not ranks <= tokens <= MAX_LENGTH:
                limits = f"{ranks} tokens, one for each rank, to {MAX_LENGTH} tokens"
                raise ValueError(f"lengths must give batches of {limits}, got {tokens}")
            workload = Workload(ranks, tokens, *heads_of(heads), mask, self.dtype, passes)
            workloads[workload] = None
        return list(workloads)

    def as_dict(self) -> dict[str, object]:
        fields = asdict(self).items()
        return {name: list(x) if isinstance(x, tuple) else x for name, x in fields}


def heads_of(text: str) -> tuple[int, int, int]:
    """Return the query heads, KV heads and head dim of a shape such as 64:8x128."""
    heads, x, dim = text.partition("x")
    query, colon, kv = heads.partition(":")
    parts = [query, kv if colon else query, dim]
    if not x or not all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts):
        raise ValueError(f"heads must be as in 64:8x128 or 8x64, got {shown(text)}")
    query_heads, kv_heads, head_dim = map(int, parts)
    if 0 in (query_heads, kv_heads, head_dim) or query_heads % kv_heads:
        raise ValueError(
            "heads must be above 0, and query heads a multiple of KV heads, as in 64:8x128, got "
            f"{text}"
        )
    return query_heads, kv_heads, head_dim


def _preset(given: dict[str, Any]) -> dict[str, object]:
    if given["preset"] is None:
        return {}
    preset = PRESETS[_one("preset", given["preset"], PRESETS)]
    for name in ("heads", "dtype", "passes", "masks"):
        if given[name] is not None:
            fixed = f"{name} are those of the preset {given['preset']}: {preset[name]}"
            raise ValueError(f"{fixed}; leave out one of the two options")
    return preset


def _contenders(strategies: Sequence[str] | None, wanted: Sequence[str] | None) -> tuple[str, ...]:
    chosen = _each("strategies", strategies if strategies is not None else [*SOFTMAX])
    for name in chosen:
        _one("strategies", name, attention_modules())
    if wanted is None:
        return (*chosen, *(name for name in contenders.PEERS if contenders.lacking(name) is None))
    if list(wanted) == ["none"]:
        return chosen
    for name in _each("peers", wanted):
        lacking = contenders.lacking(_one("peers", name, contenders.PEERS))
        if lacking is not None:
            raise ValueError(f"peers: {name} needs {lacking}, which is not installed")
    return (*chosen, *_each("peers", wanted))


def _processes(device: str, where: LaunchedProcess | None) -> int | None:
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError('device must be "cpu" on a machine without a GPU that torch can use')
    if where is not None:
        return where.size
    return torch.cuda.device_count() if device == "cuda" else None


def _ranks(
    given: Sequence[str] | None, most: int | None, where: LaunchedProcess | None, device: str
) -> tuple[int, ...]:
    if given is None:
        top = devices() if most is None else most
        powers = {2**i for i in range(int(math.log2(top)) + 1)}
        return tuple(sorted({*powers, top}))
    ranks = _numbers("ranks", given, 1024)
    if most is not None and max(ranks) > most:
        limit = f"{most} processes of the launcher" if where else f"{most} GPUs"
        raise ValueError(f"ranks must be at most the {limit}, got {max(ranks)}")
    return ranks


def _lengths(words: Iterable[str]) -> tuple[int, ...]:
    lengths = read_lengths("lengths", ",".join(words))
    if min(lengths) < 1:
        raise ValueError("lengths must be at least 1, got 0")
    if len(set(lengths)) < len(lengths):
        raise ValueError(f"lengths must be different from each other, got {shown(lengths)}")
    return tuple(lengths)


def _numbers(name: str, words: Iterable[str], most: int) -> tuple[int, ...]:
    numbers = []
    for word in _each(name, words):
        if not word.isascii() or not word.isdigit():
            raise ValueError(f"{name} must be numbers such as 4096,8192, got {shown(word)}")
        numbers.append(as_int(name, int(word[:20]), 1, most))
    return tuple(numbers)


def _each(name: str, words: Iterable[str]) -> tuple[str, ...]:
    listed = list(words)
    if not listed or "" in listed:
        raise ValueError(f"{name} must not be empty, got {shown(listed)}")
    if len(set(listed)) < len(listed):
        raise ValueError(f"{name} must be different from each other, got {shown(listed)}")
    return tuple(listed)


def _one(name: str, word: str, known: Iterable[str]) -> str:
    if word not in known:
        raise ValueError(f"{name} must be among {sorted(known)}, got {shown(word)}")
    return word
