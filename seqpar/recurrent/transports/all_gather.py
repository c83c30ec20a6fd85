"""All-gather of maps: each rank sends each map to all ranks that need it, which fold them.

Sun et al., "LASP-2" (2025), algorithm 2, with maps in the place of states: what context parallelism
for Gated DeltaNet and KDA does. One exchange a pass, posted before the work within spans.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from seqpar.comm.messages.exchange import Comm
from seqpar.core.traffic import Traffic
from seqpar.recurrent.attend import Maps, apply
from seqpar.recurrent.call import ResolvedCall
from seqpar.recurrent.chain import Chain
from seqpar.recurrent.gathering import Gathering, sent_spans
from seqpar.recurrent.packed import pack, unpack
from seqpar.recurrent.strategy import MapExchange, RecurrentStrategy


@dataclass(frozen=True)
class AllGather(RecurrentStrategy):
    """Maps are sent to all ranks that need them, at once."""

    routable = True
    transport = "all_gather"

    def exchange(
        self, comm: Comm, call: ResolvedCall, device: torch.device, backward: bool
    ) -> MapExchange:
        return GatheredMaps(comm, call, device, backward)

    def maps_traffic(self, call: ResolvedCall, rank: int) -> list[Traffic]:
        rows = []
        for direction in ("forward", "backward"):
            chain = Chain.of(call.routes, direction == "backward")
            for peer, spans in sent_spans(chain, rank):
                heads = int(np.count_nonzero(chain.number[spans] == 0))
                of_heads, full = heads * call.state_bytes, (spans.size - heads) * call.map_bytes
                rows.append(Traffic(direction, 0, peer, 1, of_heads))
                rows.append(Traffic(direction, 0, peer, 1, full))
        return rows


class GatheredMaps:
    """The states that enter a rank's spans, while all ranks send each other maps."""

    def __init__(
        self, comm: Comm, call: ResolvedCall, device: torch.device, backward: bool
    ) -> None:
        rank, routes = comm.rank, call.routes
        self._comm, self._call = comm, call
        self._label = f"recurrent {'backward' if backward else 'forward'}"
        self._plan = call.once(
            ("map gathering", backward, device), lambda: Gathering(routes, rank, backward, device)
        )
        spans = routes.held(rank).states
        self._stations = spans.states_out if backward else spans.states_in
        self.travels = self._plan.travels

    def post(self, maps: Maps) -> None:
        plan, state = self._plan, maps.state
        of_heads, of_full = plan.own
        self._heads = state.new_empty((plan.counts[0], *state.shape[1:]))
        self._heads[: len(of_heads)] = state.index_select(0, of_heads)
        self._packed = state.new_empty((plan.counts[1], *self._call.packed_shape))
        full = Maps(maps.transition.index_select(0, of_full), state.index_select(0, of_full))
        pack(full, self._packed[: len(of_full)])
        heads, packed = self._heads, self._packed
        sends = [(peer, heads[part]) for peer, part, _ in plan.sends]
        sends += [(peer, packed[part]) for peer, _, part in plan.sends]
        recvs = [(peer, heads[part]) for peer, part, _ in plan.recvs]
        recvs += [(peer, packed[part]) for peer, _, part in plan.recvs]
        self._pending = self._comm.exchange(sends, recvs, label=self._label)

    def wait(self) -> Tensor:
        self._pending.wait()
        call, plan = self._call, self._plan
        maps = unpack(call.kind, self._packed, call.shape.dim)
        states = self._heads.new_empty((self._stations, *self._heads.shape[1:]))
        running = self._heads[plan.first]
        for fold in plan.folds:
            if fold.stations is not None:
                states.index_copy_(0, fold.stations, running[fold.reached])
            if fold.maps is not None:
                before, one = running[: fold.documents], fold.maps
                running = apply(call.kind, maps.transition[one], before) + maps.state[one]
        return states
