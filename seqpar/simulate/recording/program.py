"""Programs. A program is the list of one rank's actions, in order. In an action, the rank computes,
posts messages or waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from seqpar.costs.grid import Tasks

Sizes = tuple[tuple[int, int], ...]  # (peer, bytes) of each message


class SoftmaxCompute(NamedTuple):
    """One call of softmax attention on a number of query heads.

    `head_dim` is the mean, rounded up, of the head dim of q and k and the head dim of v.
    """

    tasks: Tasks
    heads: int
    head_dim: int
    backward: bool


class LinearCompute(NamedTuple):
    """A part of one forward or backward pass of linear attention.

    The fields are the number of tokens, the number of KV heads, and the head dims (D, Dv).
    """

    share: float
    tokens: int
    heads: int
    dims: tuple[int, int]
    backward: bool


class Operators(NamedTuple):
    """Operators of torch.

    `flops` are the FLOPs of matrix products. `bytes` are the bytes that all other operators read
    and write. `new_bytes` are the bytes that are allocated for results. `calls` is the number of
    operators.
    """

    flops: int
    bytes: int
    new_bytes: int = 0
    calls: int = 0


@dataclass(slots=True)
class Compute:
    """Work on the rank's device.

    Attributes:
        work: what is computed.
        what, step, area: as in `seqpar.trace`. For torch's operators, `what` is "operators".
    """

    work: SoftmaxCompute | LinearCompute | Operators
    what: str = "operators"
    step: int = 0
    area: int = 0


@dataclass(slots=True)
class Post:
    """Messages that a rank posts together, without waiting for them.

    Attributes:
        number: the index of the exchange among the exchanges of this rank.
        sends, recvs: the messages.
        channel: the communicator.
        what, step: as in `seqpar.trace`.
    """

    number: int
    sends: Sizes
    recvs: Sizes
    channel: str = ""
    what: str = ""
    step: int = 0


@dataclass(slots=True)
class ShardExchange(Post):
    """A collective of ranks 0, 1, … with equal shards: an all-gather or a reduce-scatter.

    The collective begins when all of these ranks have posted it. As in NCCL's rings, a shard is
    sent to one NIC of each other node, and is then passed on inside the node. Equal messages
    between two nodes are simulated together, so that a collective of P ranks needs about P messages
    per node.

    Attributes:
        sends, recvs: (peer, the bytes of a shard) for each other rank.
    """


@dataclass(slots=True)
class Wait:
    """The rank waits until the exchange with this number has ended."""

    number: int


@dataclass(slots=True)
class Copy:
    """The rank copies bytes to or from its host's memory, and waits for the copy."""

    nbytes: int
    what: str = ""


@dataclass(slots=True)
class Begin:
    """The rank starts a second program, which runs concurrently with this one."""

    program: Program


@dataclass(slots=True)
class End:
    """The rank waits until a program that it has started ends."""

    program: Program


@dataclass(slots=True)
class Serve:
    """An action in which the rank runs several programs. A program is a list of actions, such as
    computations and messages.

    Each of the programs waits for one exchange, which the rank has posted earlier. The programs run
    one after another, in the order in which their exchanges end.

    Attributes:
        programs: a dict from the number of an exchange (`Post.number`) to the program that waits
            for this exchange.
    """

    programs: dict[int, Program]


Action = Compute | Post | Wait | Copy | Begin | End | Serve


@dataclass(eq=False)
class Program:
    """The actions of one rank.

    Attributes:
        actions: the actions, in order.
        ordered: whether the exchanges of a communicator run one after another, as on NCCL. On gloo,
            only messages from the same sender to the same receiver run one after another.
        peak_bytes: the most bytes held at once by tensors that the program creates. A message
            counts until the rank has waited for its exchange.
    """

    actions: list[Action] = field(default_factory=list)
    ordered: bool = True
    peak_bytes: int = 0

    def each(self) -> Iterator[Action]:
        """Yield all actions, including those of nested programs."""
        for action in self.actions:
            yield action
            if isinstance(action, Begin):
                yield from action.program.each()
            elif isinstance(action, Serve):
                for program in action.programs.values():
                    yield from program.each()

    @property
    def sent_bytes(self) -> int:
        posts = (action for action in self.each() if isinstance(action, Post))
        return sum(nbytes for post in posts for _, nbytes in post.sends)
