"""The module behind `make_attention("auto", group)`: it chooses a strategy by simulation."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from seqpar.attention.module import is_meta
from seqpar.auto.choosing import Choice, choose
from seqpar.auto.machine import MEASURE_SECONDS, cluster_of_rank_0
from seqpar.auto.measuring import can_be_measured, leaves_of, measured
from seqpar.comm.messages.exchange import Comm, Group
from seqpar.comm.messages.subgroup import as_mesh
from seqpar.core.arguments import Deterministic, Ints, as_bool, as_deterministic, as_float, shown
from seqpar.core.compiling import outside_graphs
from seqpar.core.torch_private import beside_the_caller
from seqpar.core.traffic import Traffic
from seqpar.costs.cluster import Cluster
from seqpar.layout.layout import Layout
from seqpar.simulate.candidates import Candidate, as_strategies, candidates
from seqpar.simulate.error_model import error_of
from seqpar.simulate.playback.playing import require_simpy
from seqpar.simulate.recording.recording import RecordingComm
from seqpar.softmax.module import Attention
from seqpar.softmax.strategy import Strategy
from seqpar.strategies.registry import CHOOSERS

# Arguments of a call on which the choice depends, beside the layout and shapes.
_SHARED = ("causal", "kv_layout", "prefix_lens", "window_size", "mask", "softcap")

_OPTIONS = (
    *("cluster", "strategies", "backward", "once", "measure", "measure_seconds"),
    *("check_ranks", "deterministic"),
)
_MAX_KEPT_CHOICES = 4096  # one for each kind of call


@dataclass(frozen=True)
class Auto(Strategy):
    """What a call is checked with before a strategy is chosen for it; `plan` names the choice."""

    name: ClassVar[str] = "auto"
    routable: ClassVar[bool] = False
    plan: str = ""


class AutoAttention(Attention):
    """Softmax attention whose strategy is chosen for each layout, mask and shape.

    The strategies, and of USP all meshes whose rows lie within a node, are simulated on a
    description of the cluster (`seqpar.simulate`). Those that no prediction can tell from the
    fastest are measured on the ranks, in the first such call: all in turns, forward and backward.
    The call goes through the fastest one's module. All ranks choose alike: a prediction depends on
    nothing but what they share, and they tell each other what they measure. It is done once for
    each different layout, mask and shape, and a prediction is kept with the layout: batch by batch
    that takes longer than a call of a strategy that was chosen beforehand (see the guide). `decode`
    needs no choice: strategies do not differ in it.

    See `Attention` for the call, which all strategies share. It breaks a graph of torch.compile
    where the choice is made; with `once` it does so until the first call.

    Args:
        group: a process group or a mesh, whose ranks count along its rows.
        check_ranks, deterministic: as in `Attention`. With `check_ranks` all ranks raise
            an error in the first call, and in `decode`, if their clusters or options differ.
        cluster: what the ranks run on, the same on all of them: rank r is as in `Cluster`. None:
            rank 0's `Cluster.here()`, which it sends to the others. All ranks make the module
            together, and they must be on one host. The first time on a machine rank 0 measures it,
            which takes 15 seconds on a quiet CPU, and keeps the result in $SEQPAR_CACHE or
            ~/.cache/seqpar. The other ranks wait, whatever the group's timeout is, and every rank
            logs the wait. `Cluster.here()` in a program before this one measures ahead of time.
        strategies: names of the strategies to choose among. None: all.
        backward: whether calls are differentiated, and so what is simulated; in inference mode they
            are not.
        once: whether the first call's choice holds for all others. A call that the module chosen
            then cannot compute is refused.
        measure: whether to measure what predictions cannot tell apart. Without it nothing is sent
            but a call's own messages, and each run of a program chooses alike.
        measure_seconds: the longest that rank 0 may measure its machine, without a `cluster`.
            Afterwards it takes assumed figures (`Cluster.assumed()`), and logs a warning. 0 reads
            the profile that is kept, if there is one, and measures nothing.

    Attributes:
        choice: what was chosen for the last call, and why (`str()` of it is a table); None before.

    Raises:
        ValueError: if an argument is wrong; in a call, what `Attention` says, and where no strategy
            can compute the call, with the reason of each. It names the argument.
        ImportError: without simpy, which the extra "plan" installs.
    """

    strategy = Auto
    choice: Choice | None

    def __init__(
        self,
        group: Group,
        check_ranks: bool = False,
        deterministic: Deterministic = True,
        *,
        cluster: Cluster | None = None,
        strategies: Sequence[str] | None = None,
        backward: bool = True,
        once: bool = False,
        measure: bool = True,
        measure_seconds: float = MEASURE_SECONDS,
        **others: object,
    ) -> None:
        for name in others:
            raise TypeError(f"{name} is not an option of 'auto', which has {', '.join(_OPTIONS)}")
        require_simpy()
        if as_deterministic(deterministic) == "ranks":
            Auto().anchor()  # which refuses it
        names, comm = as_strategies(strategies), Comm.of(group)
        backward, once = as_bool("backward", backward), as_bool("once", once)
        measure = as_bool("measure", measure)
        seconds = as_float("measure_seconds", measure_seconds)
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"measure_seconds must be 0 or more and finite, got {seconds}")
        if isinstance(comm, RecordingComm):
            raise ValueError("group must be of ranks that run: record a strategy, not the choice")
        if not isinstance(cluster, Cluster | None):
            raise TypeError(f"cluster must be a Cluster or None, got {shown(cluster)}")
        if cluster is None:
            cluster = cluster_of_rank_0(comm, seconds)
        if comm.size > cluster.ranks and (cluster.nodes > 1 or cluster.overlaps):
            expected = f"a cluster of at least the group's {comm.size} ranks"
            raise ValueError(f"cluster must be {expected}, got one of {cluster.ranks}")
        plan = json.dumps([cluster.to_json(), names, backward, once, measure])
        digest = hashlib.sha256(plan.encode()).hexdigest()[:16]
        self._bind(Auto(digest), as_mesh(comm, comm.size), check_ranks, deterministic)
        self.cluster, self.choice = cluster, None
        self._candidates = candidates(cluster, comm.size, names)
        self._backward, self._once, self._compared = backward, once, False
        self._measure = measure and comm.size > 1
        self._measured: dict[Any, Choice] = {}
        # whether a call of all ranks may rely on what was chosen before it, which one may do alone
        self._settled = not (self._measure or check_ranks)
        self._made: dict[Candidate, Attention] = {}
        if not self._candidates:
            raise ValueError(f"strategies must be some that {comm.size} ranks can use, got {names}")

    @property
    def sent_bytes(self) -> int:
        """How many bytes this rank has sent so far, in all calls on the group."""
        comms = {id(x._bound.comm): x._bound.comm for x in (self, *self._made.values())}
        return sum(comm.sent_bytes for comm in comms.values())

    def extra_repr(self) -> str:
        """Return what the module's representation says beside its name."""
        chosen = "nothing yet" if self.choice is None else str(self.choice.candidate)
        return f"{super().extra_repr()}, chosen={chosen}"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any
    ) -> Tensor | tuple[Tensor, ...]:
        fixed = self._fixed() if self._settled else None
        chosen = fixed or self._agreed(q, k, v, layout, **options)
        result: Tensor | tuple[Tensor, ...] = chosen(q, k, v, layout, **options)
        return result

    forward.__signature__ = inspect.signature(Attention.forward)  # type: ignore[attr-defined]
    forward.__doc__ = Attention.forward.__doc__

    @outside_graphs
    def chosen(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any) -> Attention:
        """Return the module that a call with these arguments goes through.

        It makes the choice if it has not been made, which computes and sends nothing: what a call
        would measure is as predicted until one has. Of the tensors just the shapes and dtypes
        matter. No other thread may compute attention meanwhile: hooks, which hold for the process,
        would record it.
        """
        if (fixed := self._fixed()) is not None:
            return fixed
        key, predicted = self._predicted(q, k, v, layout, **options)
        self.choice = self._measured.get(key, predicted)
        return self._module(self.choice.candidate)

    def unsupported(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any
    ) -> str | None:
        """Return why this rank would refuse a call with these arguments, or None.

        It computes and sends nothing.
        """
        try:
            found = self._fixed()
            if found is None:
                key, predicted = self._predicted(q, k, v, layout, **options)
                found = self._module(self._measured.get(key, predicted).candidate)
        except (ValueError, TypeError) as refusal:
            return str(refusal)
        return found.unsupported(q, k, v, layout, **options)

    def traffic(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        *,
        rank: int | None = None,
        **options: Any,
    ) -> list[Traffic]:
        """Return what a rank sends in a call through the module that is chosen for it."""
        chosen = self.chosen(q, k, v, layout, **options)
        return chosen.traffic(q, k, v, layout, rank=rank, **options)

    def mask_area(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any) -> Ints:
        """Return (ranks, steps): as `Attention.mask_area`, of the module that is chosen."""
        return self.chosen(q, k, v, layout, **options).mask_area(q, k, v, layout, **options)

    @outside_graphs
    def _agreed(self, *operands: Any, **options: Any) -> Attention:
        """Return the module that a call goes through; if ranks check, raise its fault on all.

        With the first such call ranks compare what they choose with, too.
        """

        def resolve() -> tuple[Any, Choice]:
            return self._predicted(*operands, **options)

        meta = is_meta(operands[0])
        if not self._bound.check_ranks or meta:
            key, predicted = resolve()
        elif self._compared:
            with self.agreeing():
                key, predicted = resolve()
        else:
            device = self._bound.comm.device
            (key, predicted), _ = self._bound.resolve_checked(device, resolve, lambda _: {})
            self._compared = True
        found = self._measured.get(key)
        if found is None and self._measure and can_be_measured(operands[0]):
            found = self._measured[key] = self._on_ranks(predicted, options, *operands)
            if len(self._measured) > _MAX_KEPT_CHOICES:
                del self._measured[next(iter(self._measured))]
        self.choice = found or predicted
        self._settled = self._settled or not (meta or (self._measure and found is None))
        return self._module(self.choice.candidate)

    def _on_ranks(
        self,
        predicted: Choice,
        options: dict[str, Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
    ) -> Choice:
        """Return a call's choice, of which close candidates are measured: all ranks call it."""
        backward = self._differentiated()
        given = {name: x for name, x in options.items() if not name.startswith("return_")}
        leaves = leaves_of((q, k, v), backward)

        def call(attn: Attention) -> Any:
            return attn(*leaves, layout, **given)

        error, comm = error_of(self.cluster), self._bound.comm
        with beside_the_caller(), torch.set_grad_enabled(backward):
            return measured(predicted, error, self._module, call, leaves, comm, backward)

    def _fixed(self) -> Attention | None:
        """Return the module of all further calls, if there is one."""
        if not self._once or self.choice is None:
            return None
        return self._module(self.choice.candidate)

    def _module(self, candidate: Candidate) -> Attention:
        """Return the module of a candidate, which is made when it is first chosen."""
        if candidate not in self._made:
            bound = self._bound
            options = {"check_ranks": bound.check_ranks, "deterministic": self.deterministic}
            self._made[candidate] = candidate.make(bound.comm, **options)
        return self._made[candidate]

    def _predicted(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any
    ) -> tuple[Any, Choice]:
        """Return what a call's measured choice is kept by, and its prediction.

        Both depend on what all ranks share alone. A prediction is made once and kept with the
        layout. A measured choice is not: ranks may drop theirs at different times, and then some
        would measure without the others.
        """
        call = self._resolve(q, k, v, layout, **options)
        given = {name: options[name] for name in _SHARED if name in options}
        if call.has_sinks:
            given["sinks"] = torch.empty(call.shape.heads, device="meta")
        found, backward = self._candidates, self._differentiated()

        def build() -> Choice:
            with beside_the_caller():
                return choose(self.cluster, found, call.shape, layout, backward=backward, **given)

        layouts = call.layout.digest, call.kv_layout.digest
        key = *layouts, call.mask, call.shape, call.has_sinks, backward
        return key, call.once((str(self._bound.strategy), backward), build)

    def _differentiated(self) -> bool:
        """Return whether calls have a backward."""
        return self._backward and not torch.is_inference_mode_enabled()


CHOOSERS["auto"] = AutoAttention
