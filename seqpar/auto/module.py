"""The module of `make_attention("auto", group)`, which chooses a strategy by simulation."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from seqpar.attention.module import is_meta
from seqpar.attention.unknown_arguments import call_arguments, unknown_option
from seqpar.auto.choosing import Choice, choose
from seqpar.auto.described_cluster import MEASURE_SECONDS, cluster_of_rank_0
from seqpar.auto.measuring import can_be_measured, leaves_of, measured
from seqpar.comm.messages.comm import Comm, Group, as_mesh
from seqpar.core.arguments import Deterministic, Ints, as_bool, as_deterministic, as_float
from seqpar.core.compiling import outside_graphs
from seqpar.core.torch_private import beside_the_caller
from seqpar.core.traffic import Traffic
from seqpar.costs.cluster import Cluster, as_cluster
from seqpar.layout.layout import Layout
from seqpar.simulate.candidates import Candidate, as_strategies, candidates
from seqpar.simulate.error_model import error_of
from seqpar.simulate.playback.playing import require_simpy
from seqpar.simulate.recording.recording import RecordingComm
from seqpar.softmax.module import Attention
from seqpar.softmax.strategy import Strategy
from seqpar.strategies.registry import CHOOSERS

# The arguments of a call on which the choice depends, in addition to layout and shapes.
_SHARED_ARGUMENTS = ("causal", "kv_layout", "prefix_lens", "window_size", "mask", "softcap")

_OPTIONS = (
    *("cluster", "strategies", "backward", "once", "measure", "measure_seconds"),
    *("check_ranks", "deterministic"),
)
_MAX_KEPT_CHOICES = 4096  # the number of calls whose choices are kept


@dataclass(frozen=True)
class Auto(Strategy):
    """The options of the choice, which ranks compare. `plan` is a digest of the options."""

    name: ClassVar[str] = "auto"
    routable: ClassVar[bool] = False
    rehearses: ClassVar[bool] = False
    plan: str = ""


class AutoAttention(Attention):
    """Softmax attention that chooses a strategy for each layout, mask and shape.

    The module has several candidates: each strategy, and for USP each mesh whose rows lie within a
    node. All candidates are simulated on a description of the cluster (`seqpar.simulate`). If
    several candidates differ by less than the error of the predictions, the first call with a new
    layout, mask or shape measures these candidates on the ranks, forward and backward, in
    interleaved rounds. The module then calls the fastest candidate.

    All ranks make the same choice, once for each combination of layout, mask and shape. The layout
    keeps the predictions. If every batch has a new layout, the choice takes additional time in
    every batch (see the guide). `decode` needs no choice.

    See `Attention` for the call, which all strategies share. torch.compile breaks its graph in
    every call, because the choice cannot be part of a graph. If the argument `once` is True, it
    breaks its graph only in the first call.

    Args:
        group: a process group, or a mesh, whose ranks are numbered row by row.
        check_ranks, deterministic: as in `Attention`. With `check_ranks`, the first call and
            `decode` raise an error on all ranks if their clusters or options differ.
        cluster: the cluster of the ranks, or the name of a preset, equal on all ranks. The
            docstring of `Cluster` says on which device each rank runs. With None, rank 0 describes
            its machine by `Cluster.here()` and sends the description to all other ranks. All ranks
            must then be on one host and construct the module together. The first time on a machine,
            rank 0 measures the machine, which takes 15 seconds on a quiet CPU. All other ranks
            wait, for longer than the timeout of the group if necessary. Rank 0 saves the result in
            $SEQPAR_CACHE or ~/.cache/seqpar. An earlier program that calls `Cluster.here()` saves
            the result too.
        strategies: the names of the strategies to choose from. None stands for all strategies.
        backward: whether the backward pass is simulated in addition to the forward pass. In
            inference mode, only the forward pass is simulated.
        once: whether all calls use the choice of the first call. The module refuses a later call if
            the chosen candidate cannot compute it.
        measure: whether to measure candidates whose predictions differ by less than their error.
            With False, nothing is sent except the messages of the call, and every run of a program
            makes the same choice.
        measure_seconds: the time limit for rank 0 to measure its machine if `cluster` is None. If
            measuring takes longer, rank 0 uses `Cluster.assumed()` and logs a warning. With 0, rank
            0 reads the saved profile, if one exists, and measures nothing.

    Attributes:
        choice: the choice of the last call, or None before the first call. `str(choice)` is a table
            with reasons.

    Raises:
        ValueError: if an argument is wrong. The message names the argument. A call raises the same
            errors as `Attention`. If no strategy can compute the call, the call raises a ValueError
            with the reason of each strategy.
        ImportError: if simpy is not installed. The extra "plan" installs it.
    """

    strategy = Auto
    choice: Choice | None

    def __init__(
        self,
        group: Group,
        check_ranks: bool = False,
        deterministic: Deterministic = True,
        *,
        cluster: Cluster | str | None = None,
        strategies: Sequence[str] | None = None,
        backward: bool = True,
        once: bool = False,
        measure: bool = True,
        measure_seconds: float = MEASURE_SECONDS,
        **others: object,
    ) -> None:
        for name in others:
            raise unknown_option(name, "auto", list(_OPTIONS), call_arguments(self.forward))
        require_simpy()
        if as_deterministic(deterministic) == "ranks":
            Auto().to_rank_invariant()  # raises the error of modules that are not rank-invariant
        names, comm = as_strategies(strategies), Comm.of(group)
        backward = as_bool("backward", backward)
        once = as_bool("once", once)
        measure = as_bool("measure", measure)
        seconds = as_float("measure_seconds", measure_seconds)
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"measure_seconds must be 0 or more and finite, got {seconds}")
        if isinstance(comm, RecordingComm):
            raise ValueError(
                "group must be of running ranks, got one that records: record a fixed strategy "
                "instead of auto"
            )
        if cluster is None:
            cluster = cluster_of_rank_0(comm, seconds)
        cluster = as_cluster(cluster)
        if comm.size > cluster.ranks and (cluster.nodes > 1 or cluster.overlaps):
            expected = f"a cluster of at least the group's {comm.size} ranks"
            raise ValueError(f"cluster must be {expected}, got one of {cluster.ranks}")
        plan = json.dumps([cluster.to_json(), names, backward, once, measure])
        digest = hashlib.sha256(plan.encode()).hexdigest()[:16]
        self._bind(Auto(digest), as_mesh(comm, comm.size), check_ranks, deterministic)
        self.cluster = cluster
        self.choice = None
        self._candidates = candidates(cluster, comm.size, names)
        self._backward = backward
        self._once = once
        self._compared = False  # whether the ranks have compared clusters and options
        self._measure = measure and comm.size > 1
        self._measured: dict[Hashable, Choice] = {}
        # Whether `once` can use the existing choice. It cannot use a choice that `chosen` has made,
        # because `chosen` possibly ran on one rank only.
        self._settled = False
        self._made: dict[Candidate, Attention] = {}
        if not self._candidates:
            raise ValueError(f"strategies must include one for {comm.size} ranks, got {names}")

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank has sent so far, in all calls on the group."""
        comms = {id(x._bound.comm): x._bound.comm for x in (self, *self._made.values())}
        return sum(comm.sent_bytes for comm in comms.values())

    def extra_repr(self) -> str:
        chosen = "nothing yet" if self.choice is None else str(self.choice.candidate)
        return f"{super().extra_repr()}, chosen={chosen}"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: object
    ) -> Tensor | tuple[Tensor, ...]:
        if self._once and self._settled and self.choice is not None:
            chosen = self._module(self.choice.candidate)
        else:
            chosen = self._agreed(q, k, v, layout, options)
        return chosen(q, k, v, layout, **options)

    forward.__signature__ = inspect.signature(Attention.forward)  # type: ignore[attr-defined]
    forward.__doc__ = Attention.forward.__doc__

    @outside_graphs
    def chosen(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: object
    ) -> Attention:
        """Return the module that a call with these arguments uses.

        If there is no choice yet, this method makes one from predictions, without computing
        attention or sending anything. Only the shapes and dtypes of the tensors matter.
        """
        self.choice = self._known_choice(q, k, v, layout, **options)
        return self._module(self.choice.candidate)

    @outside_graphs
    def unsupported(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: object
    ) -> str | None:
        """Return the reason why this rank would refuse a call with these arguments, or None.

        No attention is computed and nothing is sent.
        """
        try:
            module = self._module(self._known_choice(q, k, v, layout, **options).candidate)
        except (ValueError, TypeError) as refusal:
            return str(refusal)
        return module.unsupported(q, k, v, layout, **options)

    @outside_graphs
    def traffic(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        *,
        rank: int | None = None,
        **options: object,
    ) -> list[Traffic]:
        """Return the messages that a rank sends in a call through the chosen module."""
        chosen = self.chosen(q, k, v, layout, **options)
        return chosen.traffic(q, k, v, layout, rank=rank, **options)

    @outside_graphs
    def mask_area(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any) -> Ints:
        """Return (ranks, steps): `Attention.mask_area` of the chosen module."""
        return self.chosen(q, k, v, layout, **options).mask_area(q, k, v, layout, **options)

    @outside_graphs
    def _agreed(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, options: dict[str, object]
    ) -> Attention:
        """Return a call's module; the first call also compares the ranks' clusters and options."""

        def resolve() -> tuple[Hashable, Choice]:
            return self._predicted(q, k, v, layout, **options)

        meta = is_meta(q)
        if not self._bound.check_ranks:
            key, predicted = resolve()
        elif meta or self._compared:
            with self.agreeing(q, k, v):
                key, predicted = resolve()
        else:
            device = self._bound.comm.device
            (key, predicted), _ = self._bound.resolve_checked(device, resolve, lambda *_: {})
            self._compared = True
        choice = self._measured.get(key)
        if choice is None and self._measure and can_be_measured(q):
            choice = self._on_ranks(predicted, (q, k, v), layout, options)
            self._measured[key] = choice
            if len(self._measured) > _MAX_KEPT_CHOICES:
                del self._measured[next(iter(self._measured))]
        self.choice = choice or predicted
        self._settled = self._settled or not (meta or (self._measure and choice is None))
        return self._module(self.choice.candidate)

    def _on_ranks(
        self,
        predicted: Choice,
        operands: tuple[Tensor, Tensor, Tensor],
        layout: Layout,
        options: dict[str, object],
    ) -> Choice:
        backward = self._differentiated()
        inputs = {name: x for name, x in options.items() if not name.startswith("return_")}
        leaves = leaves_of(operands, backward)

        def call(attn: Attention) -> Tensor:
            return attn(*leaves, layout, **inputs)

        error, comm = error_of(self.cluster), self._bound.comm
        with beside_the_caller(), torch.set_grad_enabled(backward):
            return measured(predicted, error, self._module, call, leaves, comm, backward)

    def _known_choice(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: object
    ) -> Choice:
        if self._once and self.choice is not None:
            return self.choice
        key, predicted = self._predicted(q, k, v, layout, **options)
        return self._measured.get(key, predicted)

    def _module(self, candidate: Candidate) -> Attention:
        if candidate not in self._made:
            bound = self._bound
            options = {"check_ranks": bound.check_ranks, "deterministic": self.deterministic}
            self._made[candidate] = candidate.make(bound.comm, **options)
        return self._made[candidate]

    def _predicted(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: object
    ) -> tuple[Hashable, Choice]:
        """Return the key under which the measured choice of a call is kept, and the predicted
        choice.

        The key and the prediction depend only on arguments that are equal on all ranks. Layouts
        keep predictions but not measured choices. Ranks can free a layout at different times. If
        layouts kept measured choices, a rank that has freed its layout would measure again, without
        the other ranks.
        """
        call = self._resolve(q, k, v, layout, **options)
        shared: dict[str, Any] = {
            name: options[name] for name in _SHARED_ARGUMENTS if name in options
        }
        if call.has_sinks:
            shared["sinks"] = torch.empty(call.shape.heads, device="meta")
        backward = self._differentiated()

        def build() -> Choice:
            return choose(
                *(self.cluster, self._candidates, call.shape, layout), backward=backward, **shared
            )

        layouts = call.layout.digest, call.kv_layout.digest
        key = *layouts, call.mask, call.shape, call.has_sinks, backward
        return key, call.once((str(self._bound.strategy), backward), build)

    def _differentiated(self) -> bool:
        return self._backward and not torch.is_inference_mode_enabled()


CHOOSERS["auto"] = AutoAttention
