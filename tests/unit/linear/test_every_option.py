"""Every option of linear and recurrent attention and of short convolutions: right, or refused by
name before anything is sent."""

import inspect

import pytest
import torch

from seqpar import LASP2Attention, Layout, RecurrentAttention, Routing, causal_conv1d, token_shift
from seqpar.linear.kinds import KINDS, kind
from seqpar.strategies.lasp2 import TRANSPORTS as OF_STATES
from seqpar.strategies.recurrent import TRANSPORTS
from tests.support import convolutions
from tests.support.ranks import virtual
from tests.support.recurrent_calls import NAMES, RecurrentCall, oracle

RANKS = 3
LAYOUT = Layout.zigzag([0, 25, 60], RANKS)
CONTIGUOUS = Layout.contiguous([0, 25, 60], RANKS)
EXACT = {"rtol": 0, "atol": 1e-11}
SCALES = torch.tensor([0.5, -1.5], dtype=torch.float64)
# Option of a call: the fields of a `RecurrentCall` that has it.
OPTIONS = {
    "log_decay": {},
    "beta": {},
    "scale": {"options": (("scale", -1.3),)},
    "scale of each head": {"options": (("scale", 1.0),)},
    "initial_state": {"begun": True},
    "return_state": {"returned": True},
    "causal": {},
}
# Option of a module: its value, and the transports with which it is refused.
OF_MODULE = {
    "check_ranks": (True, ()),
    "blocks": (2, ()),
    "routing": (Routing(node_size=3), ("scan", "tree")),
}


def lasp2(transport, kind_name):
    return lambda comm, **options: LASP2Attention(comm, transport, **options), kind_name


def recurrent(transport, kind_name):
    make = lambda comm, **options: RecurrentAttention(  # noqa: E731
        comm, kind_name, transport, **options
    )
    return make, kind_name


MODULES = {
    f"LASP2Attention, {transport}, {name}": lasp2(transport, name)
    for transport in OF_STATES
    for name in ("linear", "constant_decay")
} | {
    f"RecurrentAttention, {transport}, {name}": recurrent(transport, name)
    for transport in TRANSPORTS
    for name in KINDS
}


# Each kind with one transport, and each transport with some kind; `make test-all` has all.
CHEAP = {f"RecurrentAttention, {TRANSPORTS[i % 3]}, {name}" for i, name in enumerate(KINDS)}
ROWS = [
    pytest.param(x, marks=() if x in CHEAP or x.startswith("LASP2") else pytest.mark.exhaustive)
    for x in MODULES
]


def keyword_options(function):
    parameters = inspect.signature(function).parameters.values()
    return {x.name for x in parameters if x.kind is x.KEYWORD_ONLY}


def test_every_option_has_a_call():
    known = {name.split()[0] for name in OPTIONS}
    for module in (LASP2Attention, RecurrentAttention):
        assert keyword_options(module.forward) <= known
        options = set(inspect.signature(module).parameters) - {"group"}
        assert options <= {*OF_MODULE, "transport", "kind"}
        step = set(inspect.signature(module.step).parameters) - {"self", "q", "k", "v", "state"}
        assert step <= set(OF_STEP)


def refuses(call, name, comm):
    """Whether a call raises a ValueError or a TypeError that begins with the option's name."""
    before = comm.sent_messages
    with pytest.raises((ValueError, TypeError)) as raised:
        call()
    text = str(raised.value)
    assert text.startswith(name) or f"'{name}'" in text, text
    assert comm.sent_messages == before


def arguments_of(call, rank):
    """This rank's operands and gates by name, and the initial states."""
    inputs, _, entering, _ = call.case.tensors()
    constant = kind(call.kind).decay == "constant"
    found = {}
    for name, x in zip(NAMES, inputs, strict=True):
        if x is not None:
            whole = name == "log_decay" and constant
            found[name] = x if whole else call.layout.shard(x, rank, 1)
    return found | {"layout": call.layout}, entering.transpose(0, 1)


@pytest.mark.parametrize("name", ROWS)
def test_a_call_option_is_right_or_refused(name):
    make, kind_name = MODULES[name]
    has = {"log_decay": kind(kind_name).decay is not None, "beta": kind(kind_name).uses_beta}
    of_states = name.startswith("LASP2")
    has |= {"causal": of_states}
    for option, fields in OPTIONS.items():
        call = RecurrentCall(kind_name, LAYOUT, **fields)
        right = oracle(call)

        def run(comm, option=option, call=call):
            arguments, entering = arguments_of(call, comm.rank)
            attn, given = make(comm), {"scale": call.case.scale}
            if option == "scale of each head":
                given["scale"] = SCALES
            elif option in ("initial_state", "return_state"):
                given[option] = entering if option == "initial_state" else True
            elif option in ("log_decay", "beta", "causal"):
                gate = arguments["q"][..., 0].sigmoid()
                wrong = {"log_decay": -gate, "beta": gate, "causal": True}[option]
                if not has[option]:
                    return refuses(lambda: attn(**arguments, **{option: wrong}), option, comm)
                if option == "causal":
                    given[option] = True
                elif not of_states:  # it must be given
                    less = {x: y for x, y in arguments.items() if x != option}
                    refuses(lambda: attn(**less), option, comm)
            return attn(**arguments, **given)

        for rank, result in enumerate(virtual(RANKS, run)):
            if result is None:
                assert not has[option]
                continue
            out, state = result if option == "return_state" else (result, None)
            wanted = torch.from_numpy(right["out"])
            if option == "scale of each head":
                wanted = wanted * SCALES[:, None]
            torch.testing.assert_close(out, LAYOUT.shard(wanted, rank, 1), **EXACT)
            if state is not None:
                final = torch.from_numpy(right["state_out"]).transpose(0, 1)
                torch.testing.assert_close(state, final, **EXACT)


@pytest.mark.parametrize("transport", OF_STATES)
def test_linear_attention_without_causality(transport):
    """Each query attends to its whole document, and a decay is refused."""
    call = RecurrentCall("linear", LAYOUT)
    q, k, v, *_ = call.case.tensors()[0]
    parts = [
        torch.einsum("bthk,bshk,bshv->bthv", *x)
        for x in zip(*(y.split([25, 35], 1) for y in (q, k, v)), strict=True)
    ]
    wanted = torch.cat(parts, 1)

    def run(comm):
        attn, (arguments, _) = LASP2Attention(comm, transport), arguments_of(call, comm.rank)
        decay = -torch.ones(2)
        refuses(lambda: attn(**arguments, causal=False, log_decay=decay), "log_decay", comm)
        return attn(**arguments, causal=False)

    for rank, out in enumerate(virtual(RANKS, run)):
        torch.testing.assert_close(out, LAYOUT.shard(wanted, rank, 1), **EXACT)


@pytest.mark.parametrize("name", ROWS)
def test_a_module_option_is_right_or_refused(name):
    make, kind_name = MODULES[name]
    transport = name.split(", ")[1]
    call = RecurrentCall(kind_name, CONTIGUOUS)
    right = torch.from_numpy(oracle(call)["out"])
    for option, (value, refused_with) in OF_MODULE.items():

        def run(comm, option=option, value=value, refused_with=refused_with):
            if transport in refused_with:
                return refuses(lambda: make(comm, **{option: value}), option, comm)
            arguments, _ = arguments_of(call, comm.rank)
            return make(comm, **{option: value})(**arguments, scale=call.case.scale)

        for rank, out in enumerate(virtual(RANKS, run)):
            if transport not in refused_with:
                torch.testing.assert_close(out, CONTIGUOUS.shard(right, rank, 1), **EXACT)


OF_STEP = {"log_decay": None, "beta": None, "scale": -1.3}


@pytest.mark.parametrize("name", [x for x in MODULES if "all_gather" in x])
def test_a_step_option_is_right_or_refused(name):
    make, kind_name = MODULES[name]
    has = {"log_decay": kind(kind_name).decay is not None, "beta": kind(kind_name).uses_beta}
    whole = Layout.contiguous([0, 7], 1)
    call = RecurrentCall(kind_name, whole, begun=True, options=(("scale", -1.3),))
    right = torch.from_numpy(oracle(call)["out"])

    def run(comm):
        attn, (arguments, entering) = make(comm), arguments_of(call, 0)
        del arguments["layout"]
        state, outs = entering[:, 0], []
        for i in range(7):
            step = {x: y if y.dim() == 1 else y[:, i] for x, y in arguments.items()}
            out, after = attn.step(**step, state=state, scale=-1.3)
            outs.append(out)
            for option in ("log_decay", "beta"):
                if not has[option] and not (name.startswith("LASP2") and option == "log_decay"):
                    wrong = step | {option: -step["q"][..., 0].abs()}
                    refuses(lambda wrong=wrong, s=state: attn.step(**wrong, state=s), option, comm)
            state = after
        return torch.stack(outs, 1)

    torch.testing.assert_close(virtual(1, run)[0], right, **EXACT)


OF_CONVOLUTIONS = ("weight", "bias", "activation", "check_ranks")


@pytest.mark.parametrize("option", OF_CONVOLUTIONS)
def test_an_option_of_a_convolution_is_right(option):
    for function in (causal_conv1d, token_shift):
        names = set(inspect.signature(function).parameters) - {"x", "layout", "group"}
        assert names <= {*OF_CONVOLUTIONS}
        if option not in names:
            continue
        width = None if function is token_shift else 4
        case = convolutions.ConvCase(
            LAYOUT,
            width,
            bias=option == "bias",
            activation="silu" if option == "activation" else None,
        )
        right = torch.from_numpy(convolutions.oracle(case)["out"])

        def run(comm, case=case, function=function):
            x, _, weight, bias = case.inputs()
            call = {"x": LAYOUT.shard(x, comm.rank), "layout": LAYOUT, "group": comm}
            call |= {} if case.width is None else {"weight": weight}
            values = {"bias": bias, "activation": case.activation, "check_ranks": True}
            return function(**call | {name: values[name] for name in [option] if name in values})

        for rank, out in enumerate(virtual(RANKS, run)):
            torch.testing.assert_close(out, LAYOUT.shard(right, rank), **EXACT)
