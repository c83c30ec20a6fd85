"""Post the messages of a pass, including messages that this rank relays for other ranks.

A *pass* is the forward or the backward of a call. To decide which messages to relay (`routing.py`),
a rank must know the sizes of the messages between its node and other nodes. In each exchange of a
pass, the ranks of a node therefore tell each other the sizes of their messages. Later passes reuse
these sizes, if their calls differ only in the values of tensors. All ranks make the same exchanges
in the same order, even if a rank has no messages in some exchanges.

A relayed message makes several *hops*, from one rank to the next rank. NCCL runs exchanges in the
order in which they are posted, so on NCCL a rank posts all hops at once. On gloo, a thread posts a
hop when the previous hop has arrived. The thread of every rank processes exchanges in the same
order, so no exchange waits for a later exchange.
"""

from __future__ import annotations

import json
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from copy import copy
from functools import partial

import torch
from torch import Tensor

from seqpar.comm.messages.comm import Comm, Pending
from seqpar.comm.messages.message_header import Exchange, Message
from seqpar.comm.routing.routing import Described, Ends, Nodes, PieceLocation, Relaying, Routing
from seqpar.core.background import Worker, in_this_mode

# The number of kinds of passes that are stored. All layers of a model usually share one kind.
_MAX_KEPT_PASSES = 128


class Relays:
    """The messages that one rank of a group relays for other ranks.

    The sizes of messages are stored for each kind of pass. Two passes are of the same *kind* if
    both are forwards, or both backwards, of calls that differ only in the values of tensors. All
    ranks must delete stored kinds in the same order. Layouts therefore cannot store them, because
    ranks free layouts at different times.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self._known: OrderedDict[str, list[Relaying]] = OrderedDict()
        self.thread: Worker | None = None

    @classmethod
    def of(cls, comm: Comm, routing: Routing) -> Relays | None:
        """Return the `Relays` that all modules on a group with this routing share.

        The result is None if no message is routed. Raises a ValueError if the group cannot be
        divided into nodes.
        """
        of_group = _of_groups.setdefault(comm, {})
        if routing not in of_group:
            nodes = Nodes(routing, comm.size)
            alone = len(nodes.members) == 1 or nodes.nics == 1
            of_group[routing] = None if alone else cls(nodes)
        return of_group[routing]

    def in_pass(self, comm: Comm, device: torch.device, kind: str) -> Comm:
        """Return the Comm for one pass of a call.

        In all passes of one `kind`, each rank must send messages of the same sizes to the same
        peers.
        """
        # The numbers of the call are set here and not in the thread, because the next call may
        # begin before the thread runs.
        for peer in range(comm.size):
            comm.numbers.between(comm._order[peer])
        known = self._known.setdefault(kind, [])
        self._known.move_to_end(kind)
        if len(self._known) > _MAX_KEPT_PASSES:
            self._known.popitem(last=False)
        of_pass = copy(comm)
        of_pass._router = _Pass(self, device, known).post
        return of_pass

    def submit(self, job: Callable[[], None]) -> Future[None]:
        if self.thread is None:
            self.thread = Worker("seqpar relays")
        return self.thread.submit(in_this_mode(job))


class _Pass:
    """The relayed messages of one pass. The ranks of a node tell each other the sizes of an
    exchange only in the first pass of a kind.
    """

    def __init__(self, relays: Relays, device: torch.device, known: list[Relaying]) -> None:
        self._relays, self._device, self._known = relays, device, known
        self._posted = 0

    def post(
        self, comm: Comm, outgoing: list[Message], incoming: list[Message], exchange: Exchange
    ) -> Pending:
        comm = copy(comm)
        comm._router = None
        sent, straight_out = self._divided(comm.rank, outgoing)
        received, straight_in = self._divided(comm.rank, incoming)
        own = _described(sent), _described(received)
        if self._posted == len(self._known):
            self._known.append(self._agree(comm, own, exchange))
        relaying = self._known[self._posted]
        self._posted += 1
        assert relaying.own == own, f"{exchange}: {relaying.own} has become {own}"
        comm.count(len(straight_out), sum(x.nbytes for _, x in straight_out))
        comm.count(relaying.messages, relaying.bytes)
        held = [torch.empty(n, dtype=dtype, device=self._device) for n, dtype in relaying.held]
        tables = [[x.view(-1) for _, x in sent], [x.view(-1) for _, x in received], held]
        post = [
            partial(_post, comm, _at(tables, sends), _at(tables, recvs), exchange._replace(hop=hop))
            for hop, (sends, recvs) in enumerate(relaying.hops)
            if hop and (sends or recvs)
        ]
        first_out, first_in = (_at(tables, part) for part in relaying.hops[0])
        begun = _post(comm, straight_out + first_out, straight_in + first_in, exchange)
        if comm.runs_in_order(self._device):
            pending = [begun, *(each() for each in post)]
            return Pending([], [], lambda: _wait(pending))
        if not post:
            return begun

        def relay() -> None:
            last = begun
            for each in post:
                last.wait()
                last = each()
            arriving.append(last)

        # Ranks that only relay also wait, so that all messages of a call have arrived when the call
        # ends.
        def wait() -> None:
            relayed.result()
            arriving.pop().wait()

        arriving: list[Pending] = []
        relayed = self._relays.submit(relay)
        return Pending([], [], wait)

    def _divided(self, rank: int, messages: list[Message]) -> tuple[list[Message], list[Message]]:
        node_of, least = self._relays.nodes.of, self._relays.nodes.least_bytes
        relayed, straight = list[Message](), list[Message]()
        for message in messages:
            peer, x = message
            far = node_of[peer] != node_of[rank] and x.nbytes >= least
            (relayed if far else straight).append(message)
        return relayed, straight

    def _agree(self, comm: Comm, own: Ends, exchange: Exchange) -> Relaying:
        """Tell the ranks of this node which messages this rank exchanges with other nodes, and
        return what this rank relays.
        """
        # Other nodes need not be asked, because both the sender's node and the receiver's node know
        # a message. `traffic` of a strategy cannot replace this, because it has no sizes of single
        # exchanges.
        text, mates = json.dumps(own).encode(), self._relays.nodes.mates(comm.rank)
        others = [mate for mate in mates if mate != comm.rank]

        def gather(x: Tensor, sizes: list[int]) -> list[Tensor]:
            arriving = [x.new_empty(size) for size in sizes]
            sends = [(mate, x) for mate in others]
            recvs = list(zip(others, arriving, strict=True))
            named = exchange._replace(label=f"{exchange.label}, routes")
            _post(comm, sends, recvs, named).wait()
            comm.count(len(sends), x.nbytes * len(sends))
            return arriving

        device = comm.device
        sizes = gather(torch.tensor([len(text)], device=device), [1] * len(others))
        data = torch.tensor(list(text), dtype=torch.uint8, device=device)
        texts = gather(data, [int(size) for size in sizes])
        told = [json.loads(bytes(x.tolist())) for x in texts]
        known = {comm.rank: own}
        for mate, (sends, recvs) in zip(others, told, strict=True):
            known[mate] = [Described(*x) for x in sends], [Described(*x) for x in recvs]
        return Relaying.of(self._relays.nodes, comm.rank, known)


def _post(comm: Comm, sends: list[Message], recvs: list[Message], exchange: Exchange) -> Pending:
    return comm.start(sends, recvs, exchange) if sends or recvs else Pending([], [])


def _at(tables: list[list[Tensor]], part: list[tuple[int, PieceLocation]]) -> list[Message]:
    """Return the messages (peer, tensor), given each message's peer and the location of its tensor
    in `tables`.
    """
    return [(peer, tables[at.table][at.number][at.start : at.stop]) for peer, at in part]


def _described(messages: list[Message]) -> list[Described]:
    return [Described(peer, x.numel(), str(x.dtype).split(".")[1]) for peer, x in messages]


def _wait(pending: list[Pending]) -> None:
    for each in pending:
        each.wait()


_of_groups: weakref.WeakKeyDictionary[Comm, dict[Routing, Relays | None]]
_of_groups = weakref.WeakKeyDictionary()
