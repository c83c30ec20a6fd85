"""A replay does what the recorded function did, on other inputs."""

import weakref

import pytest
import torch
from seqpar.kernels.steps import step

from seqpar.core.recording import Recorder


def recorded(function, *inputs):
    recorder = Recorder(inputs)
    with recorder:
        results = function(*recorder.inputs)
        return recorder.recording(results)


def drawn(*shape):
    return torch.randn(shape)


def in_views(x, y):
    first, second = x.transpose(0, 1).split([2, 3], 0)
    return [torch.cat([first[:, 1:], y[:2, 2:]]), second * 2]


def in_place(x, y):
    total = torch.zeros(4, 5)
    total[1:3].add_(x[1:3], alpha=2)
    total.copy_(total + y)
    total[:, 1].mul_(3)
    return [total]


def into_memory(x, y):
    memory = x.new_empty(40)
    torch.index_select(x, 0, torch.tensor([2, 0]), out=memory[:10].view(2, 5))
    torch.sub(y, x, out=memory[20:].view(4, 5))
    return [memory[:10], memory.view(8, 5)[4:], memory[:8].view(torch.int32).clone()]


def with_several_results(x, y):
    (values, indices), most = x.sort(-1), y.max()
    return [values, indices, values + most]


FUNCTIONS = [in_views, in_place, into_memory, with_several_results]


@pytest.mark.parametrize(
    ("function", "inference"),
    [*((x, False) for x in FUNCTIONS), (in_views, True), (in_place, True)],
)
def test_a_replay_returns_equal_bits(function, inference):
    with torch.inference_mode(inference), torch.no_grad():
        recording = recorded(function, drawn(4, 5), drawn(4, 5))
        for _ in range(2):
            x, y = drawn(4, 5), drawn(4, 5)
            before = x.clone(), y.clone()
            found, expected = recording(x, y), function(x, y)
            assert all(map(torch.equal, found, expected))
            assert all(map(torch.equal, (x, y), before))


def test_inputs_with_one_memory_are_told_apart():
    def difference(x, y):
        return [x[1:] - y[:-1]]

    x, y = drawn(4), drawn(4)
    whole = drawn(8)
    for given in ((x, x), (whole[:4], whole[:4])):
        recording = recorded(difference, *given)
        assert torch.equal(recording(x, y)[0], difference(x, y)[0])


def test_a_step_calls_its_function_again():
    calls = []

    def called(x, pair):
        calls.append(pair[1])
        return x + pair[0], "a handle"

    def function(x, y):
        total, handle = step(called, x[1:], (y[1:], 5))
        step(calls.append, handle)
        return [total]

    recording = recorded(function, drawn(3), drawn(3))
    x, y = drawn(3), drawn(3)
    assert torch.equal(recording(x, y)[0], x[1:] + y[1:])
    assert calls == [5, "a handle"] * 2


def test_operators_within_a_step_are_not_repeated():
    total = torch.zeros(3)

    def called(x):
        total.add_(x)

    def function(x):
        step(called, x)
        return [x * 2]

    recording = recorded(function, torch.ones(3))
    recording(torch.ones(3))
    assert total.tolist() == [2, 2, 2]


def test_a_step_within_a_step_is_not_repeated():
    def called(x):
        total = x * 2
        step(total.add_, 1)
        return total * 3

    recording = recorded(lambda x: [step(called, x)], drawn(3))
    x = drawn(3)
    assert torch.equal(recording(x)[0], (x * 2 + 1) * 3)


def test_memory_is_freed_after_its_last_step():
    alive = []

    def note(x):
        alive.append([ref() is not None for ref in seen])
        seen.append(weakref.ref(x))

    seen = []

    def function(x):
        for _ in range(3):
            x = x[1:] * 2
            step(note, x)
        return [x]

    recording = recorded(function, drawn(9))
    alive.clear()
    seen.clear()
    recording(drawn(9))
    assert alive == [[], [False], [False, False]]


UNKNOWN = torch.zeros(3)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [x + 1 if x.sum() > 0 else x - 1],
        lambda x: [x * x.max().item()],
        lambda x: [step(lambda x: (x, [x * 2]), x)[1][0] + 1],
        lambda x: [x[x > 0]],
        lambda x: [UNKNOWN.add_(x).clone()],
        lambda x: [torch.add(x, 1, out=UNKNOWN).clone()],
        lambda x: [step(lambda x, y: x + y[0], x, {0: x})],
    ],
)
def test_steps_that_could_differ_are_refused(function):
    assert recorded(function, drawn(3)) is None


def test_a_constant_is_kept_and_read():
    def function(x, table):
        return recorded(lambda x: [x.index_select(0, table)], x)

    recording = function(drawn(3), torch.tensor([2, 0]))
    x = drawn(3)
    assert torch.equal(recording(x)[0], x[[2, 0]])


def test_nothing_is_recorded_after_an_error():
    def fails(x):
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        recorded(fails, drawn(3))
    assert step(lambda: 3) == 3
