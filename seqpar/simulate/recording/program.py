"""Programs: what a rank computes, posts and waits for, in its own order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from seqpar.costs.grid import Tasks


class SoftmaxCompute(NamedTuple):
    """A call of softmax attention: its tasks, in so many query heads.

    `head_dim` is the mean of that of q and k and that of v, rounded up.
    """

    tasks: Tasks
    heads: int
    head_dim: int
    backward: bool


class LinearCompute(NamedTuple):
    """A share of a pass of linear attention over so many tokens, in KV heads of dims D and Dv."""

    share: float
    tokens: int
    heads: int
    dims: tuple[int, int]
    backward: bool


class Operators(NamedTuple):
    """Torch's operators: the FLOPs of matrix products, and the bytes that the others touch.

    `new_bytes` are those of memory that has been set aside for results, and `calls` is how many
    operators there are.
    """

    flops: int
    bytes: int
    new_bytes: int = 0
    calls: int = 0


@dataclass(slots=True)
class Compute:
    """Something that a rank computes.

    Attributes:
        work: what it is.
        what, step, area: as in `seqpar.trace`; torch's operators are "operators".
    """

    work: SoftmaxCompute | LinearCompute | Operators
    what: str = "operators"
    step: int = 0
    area: int = 0


@dataclass(slots=True)
class Post:
    """Messages that a rank posts at once, and goes on.

    Attributes:
        number: of the exchange, among the rank's.
        sends, recvs: (rank, bytes) of each message.
        channel: the communicator.
        what, step: as in `seqpar.trace`.
    """

    number: int
    sends: tuple[tuple[int, int], ...]
    recvs: tuple[tuple[int, int], ...]
    channel: str = ""
    what: str = ""
    step: int = 0


@dataclass(slots=True)
class Wait:
    """The rank goes on when the exchange of this number has ended."""

    number: int


@dataclass(slots=True)
class Copy:
    """The rank copies bytes to its host's memory, or from there, and goes on at the end."""

    nbytes: int
    what: str = ""


@dataclass(slots=True)
class Begin:
    """Another program of the rank begins, and runs beside this one."""

    program: Program


@dataclass(slots=True)
class End:
    """The rank goes on when that program has ended."""

    program: Program


@dataclass(slots=True)
class Serve:
    """The rank runs programs in the order in which exchanges end that it has posted.

    Attributes:
        programs: each with the number of its exchange.
    """

    programs: dict[int, Program]


Action = Compute | Post | Wait | Copy | Begin | End | Serve


@dataclass(eq=False)
class Program:
    """What one rank does.

    Attributes:
        actions: in their order.
        ordered: whether exchanges of a communicator run one after another, as on NCCL; otherwise
            messages from one rank to another do, as on gloo.
        peak_bytes: the most that tensors held at once which were made meanwhile.
    """

    actions: list[Action] = field(default_factory=list)
    ordered: bool = True
    peak_bytes: int = 0

    def each(self) -> Iterator[Action]:
        """Yield all actions, those of programs beside this one included."""
        for action in self.actions:
            yield action
            if isinstance(action, Begin):
                yield from action.program.each()
            elif isinstance(action, Serve):
                for program in action.programs.values():
                    yield from program.each()

    @property
    def sent_bytes(self) -> int:
        """How many bytes the rank sends."""
        posts = (action for action in self.each() if isinstance(action, Post))
        return sum(nbytes for post in posts for _, nbytes in post.sends)
