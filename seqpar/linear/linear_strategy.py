"""`LinearStrategy`, the base class of all strategies of linear attention.

A *span* is a range of consecutive tokens of a document on one rank. A *state* is a matrix for each
head, which summarises the tokens of a document so far. With the subclass `StateStrategy`, ranks
exchange states. With the subclass `MapStrategy`, ranks exchange *maps*. The map of a span is the
function from the state before the span to the state after the span.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from seqpar.attention.backend import DEFAULT, refusal
from seqpar.attention.operands import check_rows, naming_rank
from seqpar.comm.messages.comm import Comm
from seqpar.core.traffic import Traffic
from seqpar.linear.attend import HookedSteps, request_tables
from seqpar.linear.final_states import final_states_traffic
from seqpar.linear.inputs import Gradients, Inputs, empty_inputs
from seqpar.linear.linear_call import LinearArguments, LinearCall, check_initial_state

# The backends that are preferred on CUDA. Our Triton kernels compute every call of the family
# "linear", whose decays are constant or absent.
PREFERRED = {"linear": "triton", "recurrent": "fla"}

C = TypeVar("C", bound=LinearCall)
O = TypeVar("O")  # noqa: E741  what leaves spans: a Tensor of states, or Maps
O_contra = TypeVar("O_contra", contravariant=True)


class ForwardResult(NamedTuple):
    out: Tensor  # (B, T_local, max(Hq, H), V), in q's dtype
    final_states: Tensor  # (documents, B, H, K, V), or (0, …) if they are not returned
    # (states_in, B, H, K, V), the states that entered the rank's spans, which backward needs
    states_in: Tensor


class BackwardResult(NamedTuple):
    gradients: Gradients  # of the inputs
    # (documents, B, H, K, V), whose sum over ranks is the gradient of the initial states. None
    # without initial states.
    dinitial: Tensor | None


class Exchange(Protocol[O_contra]):
    """The exchange of states, or of maps, between ranks in one forward or one backward.

    `post` sends states or maps, and `wait` returns the states that this rank needs. The object can
    be made before the states are known. In a backward with maps, gradients of states are sent back.
    `travels` says whether this rank sends or receives any message. If `travels` is true, the caller
    computes something else before it calls `wait`.
    """

    travels: bool

    def post(self, outgoing: O_contra) -> None:
        """Begin to send the states or maps of this rank.

        `outgoing` has a state or a map for each position of a document at which this rank has a
        state, in the order of `routes.py`. For the first range of tokens of a document, only the
        state in a map is used (`maps/ends.py`).
        """

    def wait(self) -> Tensor:
        """Return the states at the rank's stations, (stations, B, H, K, V), ordered by slot.

        If maps are exchanged, the states that enter the first spans of documents are not set.
        """


def exchanged(exchange: Exchange[O], outgoing: O, steps: HookedSteps[O, Any]) -> Tensor:
    """Run an exchange of the states or maps `outgoing`, and return the states that it delivers.
    While messages are sent, run `Steps.local`.
    """
    exchange.post(outgoing)
    if exchange.travels:
        steps.local()
    return exchange.wait()


@dataclass(frozen=True)
class LinearStrategy(Generic[C]):
    """The base class of strategies of linear attention: forward, backward and predicted messages.

    The fields of a strategy are its options, and `str()` of a strategy must show all of them.
    States are (n, B, H, K, V), in fp32 (fp64 for fp64).
    """

    name: ClassVar[str]
    routable: ClassVar[bool] = True
    rehearses: ClassVar[bool] = True
    transport: ClassVar[str]  # the name of the exchange that users pass
    # The family of backends: "linear" if states are exchanged, and "recurrent" if maps are
    # exchanged.
    family: ClassVar[Literal["linear", "recurrent"]]
    state_dims: ClassVar[str]  # the names of a state's dimensions in errors

    def described(self) -> dict[str, object]:
        """Return the options, by name, that must be the same on all ranks."""
        return {"transport": self.transport}

    def resolve(
        self, comm: Comm, arguments: LinearArguments, inputs: Inputs, initial: Tensor | None
    ) -> C:
        """Return the resolved call.

        Raise a ValueError if the call is wrong or cannot be computed exactly. The error names the
        argument, its value, the expected value, and the rank.
        """
        with naming_rank(comm):
            comm.check_device("q", inputs.q.device)
            self.check_shapes(inputs)
            arguments = self.with_backend(arguments, inputs)
            call = self.to_call(comm, arguments, inputs, initial is not None)
            tokens = call.layout.holdings[comm.rank].tokens
            check_rows(inputs.q, inputs.k, inputs.v, tokens, tokens)
            self.check_gates(inputs)
            check_initial_state(call.layout, call.shape, initial, self.state_dims)
            if reason := refusal(self.family, arguments.backend, inputs.q, inputs.v):
                raise ValueError(reason)
        return call

    def with_backend(self, arguments: LinearArguments, inputs: Inputs) -> LinearArguments:
        """Return the arguments with the default backend if the user has not chosen a backend."""
        if arguments.backend != DEFAULT:
            return arguments
        return arguments._replace(backend=self.default_backend(inputs))

    def default_backend(self, inputs: Inputs) -> str:
        """Return the backend that is used if the user does not choose one.

        On CPUs, the default is "aten". On CUDA, the default may also be "aten". In this case, the
        first use logs a warning, because "aten" launches many small operators.
        """
        chosen, preferred = "aten", PREFERRED[self.family]
        if inputs.q.is_cuda:
            reason = refusal(self.family, preferred, inputs.q, inputs.v)
            if reason is None:
                chosen = preferred
            else:
                _warn(f"{self.family} attention runs as plain PyTorch on CUDA: {reason}")
        return chosen

    def check_shapes(self, inputs: Inputs) -> None:
        """Raise a ValueError if the shapes of the inputs are wrong, before other code uses the
        shapes.
        """
        raise NotImplementedError

    def check_gates(self, inputs: Inputs) -> None:
        """Raise a ValueError if decays, β or numbers of heads are wrong.

        q, k and v have already been checked against the layout.
        """
        raise NotImplementedError

    def to_call(
        self, comm: Comm, arguments: LinearArguments, inputs: Inputs, has_initial_state: bool
    ) -> C:
        """Return the resolved call. Raise a ValueError if the layout or a number among the
        arguments is wrong.

        The layout stores the data that all calls with these settings share.
        """
        raise NotImplementedError

    def forward(self, comm: Comm, call: C, inputs: Inputs, initial: Tensor | None) -> ForwardResult:
        """Return out for this rank's queries, which attend to the tokens of all ranks, and the
        other results of forward.
        """
        raise NotImplementedError

    def backward(
        self, comm: Comm, call: C, inputs: Inputs, states_in: Tensor, dout: Tensor, dfinal: Tensor
    ) -> BackwardResult:
        """Return the gradients of this rank's inputs and of the initial states.

        `states_in` has the states that forward returned for backward. `dfinal` has the gradients of
        the final states, (documents, B, H, K, V). If final states were not returned, `dfinal` is
        (0, …).
        """
        raise NotImplementedError

    def request_tables(self, comm: Comm, call: C, inputs: Inputs, backward: bool) -> None:
        """Request all tables of a pass, so that a rehearsal can copy them to the device together.
        The inputs may be empty.
        """
        spans = call.routes.held(comm.rank).states
        self.exchange(comm, call, inputs.q.device, backward)
        request_tables(inputs, spans, call.options, backward)

    def rehearse(self, comm: Comm, call: C, backward: bool) -> None:
        """Request the tables of forward and, with `backward`, the tables of backward. The operands
        are meta tensors.
        """
        call = replace(call, options=call.options.on_meta())
        tokens = call.layout.holdings[call.rank].tokens
        inputs = empty_inputs(call.shape, tokens, torch.device("meta"))
        for direction in (False, True)[: 1 + backward]:
            self.request_tables(comm, call, inputs, direction)

    def exchange(self, comm: Comm, call: C, device: torch.device, backward: bool) -> Exchange[Any]:
        """Return the object that exchanges states or maps in a pass. The states or maps are not yet
        needed.
        """
        raise NotImplementedError

    def exchange_traffic(self, call: C, rank: int) -> list[Traffic]:
        """Return the messages that a rank would send in the exchanges of states or maps, in forward
        and backward.
        """
        raise NotImplementedError

    def traffic(self, call: C, rank: int) -> list[Traffic]:
        """Return all messages that a rank would send in a call, by direction, step and peer."""
        ends = final_states_traffic(call, rank, gradients=self.family == "recurrent")
        return [*self.exchange_traffic(call, rank), *ends]


@cache
def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)
