"""Batches: each document once, whatever the ranks, and wherever a training goes on."""

import copy
import gc
import itertools
import json
import multiprocessing
import threading
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpar import balance, make_attention
from seqpar.balance.planning.divide import in_order, steps_of_epoch
from seqpar.softmax.strategy import Strategy
from tests.support.processes import PROCESSES
from tests.support.steady import SilentComm
from tests.support.tiers import examples

MODEL = balance.Model.preset("llama-8b")
INLINE = {"workers": 0, "tokens": 4096}


def planner(nodes=1, capacity=8192):
    cluster = balance.Cluster.preset(f"{nodes}x8-h100")
    return partial(
        balance.plan, cluster=cluster, model=MODEL, capacity=capacity, method="bytescale"
    )


def lengths_of(documents, seed=0):
    return np.random.default_rng(seed).lognormal(5, 1.2, documents).astype(int)


LENGTHS = lengths_of(200)


def documents_of(plan):
    return [int(i) for batch in plan.micro_batches for i in batch.documents]


def test_each_epoch_has_every_document_in_new_order():
    batches = balance.Batches(LENGTHS, planner(), **INLINE)
    count = len(batches)
    epochs = [[documents_of(plan) for plan in batches] for _ in range(2)]
    assert len(epochs[0]) == count > 10
    for steps in epochs:
        assert sorted(itertools.chain(*steps)) == np.flatnonzero(LENGTHS).tolist()
    assert epochs[0] != epochs[1]
    assert (batches.epoch, batches.step) == (2, 0)


def test_steps_respect_token_limits_and_name_their_documents():
    for plan in balance.Batches(LENGTHS, planner(), **INLINE):
        documents = documents_of(plan)
        assert LENGTHS[documents].sum() <= 4096 or len(documents) == 1
        for batch in plan.micro_batches:
            assert (LENGTHS[batch.documents] == batch.lengths).all()


@examples(8, 20)
@given(st.integers(0, 30), st.integers(0, 2), st.integers(0, 2**40), st.integers(0, 3))
def test_training_resumes_at_any_step_and_rank_count(step, epoch, seed, deferral):
    options = INLINE | {"seed": seed, "deferral": deferral}
    lengths = lengths_of(60)
    whole = balance.Batches(lengths, planner(1), **options)
    seen = [sorted(documents_of(plan)) for _ in range(epoch + 1) for plan in whole]
    first, steps, before = balance.Batches(lengths, planner(1), **options), [], step
    for plan in itertools.islice(_endless(first), step % len(seen)):
        steps.append(sorted(documents_of(plan)))
    second = balance.Batches(lengths, planner(4), **INLINE | {"deferral": deferral})
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for plan in itertools.islice(_endless(second), len(seen) - before % len(seen)):
        steps.append(sorted(documents_of(plan)))
    assert steps == seen


RESUMES = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=3)


@examples(quick=3, all_of_them=8)
@given(RESUMES, st.booleans())
def test_each_token_is_read_once_per_epoch(runs, equal):
    """A run is on so many ranks, stops after so many steps, and leaves its state as JSON."""
    lengths = lengths_of(25, seed=5)
    starts = np.cumsum(lengths) - lengths
    dataset = [torch.arange(n) + start for n, start in zip(lengths, starts, strict=True)]
    options = {"workers": 0, "tokens": 2048, "micro_batches": 3 if equal else None}
    state, read = None, []
    for ranks, steps in [*runs, (1, 1000)]:
        cluster = balance.Cluster.preset(f"1x{ranks}-h100")
        plan = partial(balance.plan, cluster=cluster, model=MODEL, capacity=1200)
        every_rank = [balance.Batches(lengths, plan, **options) for _ in range(ranks)]
        for rank, batches in enumerate(every_rank):
            if state is not None:
                batches.load_state_dict(json.loads(state))
            left = len(batches) - batches.step if batches.epoch == 0 else 0
            for step in itertools.islice(batches.read(dataset, rank), min(steps, left)):
                read += [local["input_ids"] for local in step.micro_batches]
        (state,) = {json.dumps(batches.state_dict()) for batches in every_rank}
    assert json.loads(state)["epoch"] == 1
    assert torch.equal(torch.cat(read).sort().values, torch.arange(int(lengths.sum())))


def test_a_state_describes_the_last_yielded_step():
    options = {"tokens": 4096, "workers": 2, "ahead": 3}
    steps = [documents_of(plan) for plan in balance.Batches(LENGTHS, planner(), **INLINE)]
    first = balance.Batches(LENGTHS, planner(), **options)
    seen = [documents_of(plan) for plan in itertools.islice(first, 4)]
    again = [documents_of(plan) for plan in first]  # a loop that was left goes on, too
    second = balance.Batches(LENGTHS, planner(4), **options)
    second.load_state_dict(balance.Batches(LENGTHS, planner(), **INLINE).state_dict() | {"step": 4})
    assert seen + again == steps
    assert [sorted(documents_of(plan)) for plan in second] == [sorted(x) for x in steps[4:]]


@pytest.mark.parametrize("lengths", [[], [0, 0], [100, 200, 300]])
def test_an_epoch_without_remaining_steps_ends(lengths):
    batches = balance.Batches(lengths, planner(), **INLINE)
    batches.load_state_dict(batches.state_dict() | {"step": len(batches)})
    assert list(batches) == []
    assert (batches.epoch, batches.step) == (1, 0)
    assert len(list(batches)) == len(batches)
    assert (batches.epoch, batches.step) == (2, 0)


def test_an_iteration_ends_when_another_begins():
    batches = balance.Batches(LENGTHS, planner(), **INLINE)
    running, before = iter(batches), batches.state_dict()
    next(running)
    batches.load_state_dict(before | {"seed": 3, "step": 1})
    with pytest.raises(RuntimeError, match=r"'seed': 3.*begin a new iteration"):
        next(running)
    running = iter(batches)
    next(running)
    next(iter(batches))
    with pytest.raises(RuntimeError, match="begin a new iteration"):
        next(running)


def _endless(batches):
    while True:
        yield from batches


def test_deferral_evens_out_work_and_is_bounded():
    lengths = lengths_of(4000)
    drawn = steps_of_epoch(lengths, 2**14, seed=3, epoch=1)
    dealt = steps_of_epoch(lengths, 2**14, seed=3, epoch=1, deferral=3)
    assert sorted(np.concatenate(dealt)) == sorted(np.concatenate(drawn))
    at = {int(i): number for number, step in enumerate(drawn) for i in step}
    late = [number - at[int(i)] for number, step in enumerate(dealt) for i in step]
    assert max(late) == 3
    before, after = (_uneven(lengths, steps, window=4) for steps in (drawn, dealt))
    assert after < 0.5 * before
    assert all(lengths[step].sum() <= 2**14 for step in dealt)


def test_nothing_is_deferred_by_default():
    batches = balance.Batches(LENGTHS, planner(), tokens=4096, workers=0)
    order = [i for plan in batches for i in sorted(documents_of(plan))]
    drawn = steps_of_epoch(LENGTHS, 4096, seed=0, epoch=0)
    assert order == [int(i) for step in drawn for i in np.sort(step)]
    assert len(drawn) == len(in_order(LENGTHS[np.concatenate(drawn)], 4096))


def _uneven(lengths, steps, window):
    """Return by how much the steps of a window differ in work from their mean, on average."""
    work = [float(np.square(lengths[step]).sum()) for step in steps]
    work = np.reshape(work[: len(work) // window * window], (-1, window))
    return float((work.max(1) / work.mean(1) - 1).mean())


def test_steps_do_not_depend_on_the_sampler():
    """The same order with every version of numpy: states of older versions stay valid."""
    assert steps_of_epoch(np.full(10, 5), 20, seed=1, epoch=2)[0].tolist() == [6, 2, 7, 1]


def test_plans_are_made_in_another_process(monkeypatch):
    here = threading.get_native_id()

    def recording(lengths):
        if threading.get_native_id() == here:
            raise AssertionError("planned in the caller's process")
        return planner()(lengths)

    rng = torch.random.get_rng_state()
    plans = list(balance.Batches(LENGTHS, recording, tokens=4096))
    inline = list(balance.Batches(LENGTHS, planner(), **INLINE))
    assert [plan.digest for plan in plans] == [plan.digest for plan in inline]
    assert torch.equal(rng, torch.random.get_rng_state())


def test_workers_prepare_layouts(monkeypatch):
    attn = make_attention("ring", SilentComm(0, 8))
    sizes = {"heads": 4, "head_dim": 16, "dtype": torch.bfloat16, "device": "meta"}
    prepare = attn.preparation(**sizes, causal=True)
    batches = balance.Batches(LENGTHS, planner(), tokens=4096, prepare=prepare)
    step = next(batches.read([np.zeros(n, int) for n in LENGTHS], 0))
    monkeypatch.setattr(Strategy, "rehearse", Mock(side_effect=AssertionError("built again")))
    for batch in step.micro_batches:
        assert batch["layout"]._takes_tables
        prepare(batch["layout"])
    with pytest.raises(ValueError, match="prepare must be for rank 1, got one for rank 0"):
        batches.read([], 1)
    with pytest.raises(ValueError, match="prepare must"):
        balance.Batches(LENGTHS, planner(), prepare=3)


def test_a_step_waits_only_for_its_plan():
    """With the test above: a training does not wait for plans that take less than a step."""
    allowed = multiprocessing.get_context("fork").Semaphore(0)

    def waiting(lengths):
        assert allowed.acquire(timeout=20)
        return planner()(lengths)

    dataset = [torch.arange(n) for n in LENGTHS]
    steps = balance.Batches(LENGTHS, waiting, tokens=4096).read(dataset, 0)
    for _ in range(6):
        allowed.release()
        next(steps)
    for _ in LENGTHS:
        allowed.release()  # the process may end
    steps.close()


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_what_other_processes_cannot_be_sent_is_named(monkeypatch):
    monkeypatch.setattr(multiprocessing.context, "_default_context", PROCESSES)
    with pytest.raises(ValueError, match=r"planner and dataset must be picklable.*workers=0"):
        list(balance.Batches([4], lambda lengths: planner()(lengths)))


def test_an_error_of_the_planner_reaches_the_caller():
    with pytest.raises(ValueError, match="capacity"):
        list(balance.Batches([10**6], planner(capacity=8), tokens=4096))


def test_planner_errors_name_the_documents():
    lengths = [0, 5, 10**6]
    with pytest.raises(ValueError, match=r"document 0 has 1000000(.|\n)*number \[i\] of \[2\]"):
        list(balance.Batches(lengths, planner(capacity=8), tokens=8))


def test_an_error_lets_the_workers_go():
    before = {*multiprocessing.active_children()}
    gc.disable()
    try:
        with pytest.raises(ValueError, match="capacity") as refusal:
            next(iter(balance.Batches([10**6], planner(capacity=8), tokens=4096, workers=2)))
        assert {*multiprocessing.active_children()} > before
        del refusal
        assert {*multiprocessing.active_children()} <= before
    finally:
        gc.enable()


def test_plans_have_the_requested_number_of_micro_batches():
    batches = balance.Batches(LENGTHS, planner(capacity=256), micro_batches=4, **INLINE)
    plans = list(batches)
    assert {len(plan.micro_batches) for plan in plans} == {4}
    assert any(not batch.documents.size for plan in plans for batch in plan.micro_batches)
    empty = next(x for plan in plans for x in plan.micro_batches if not x.documents.size)
    assert empty.layout.tokens == 0
    assert plans[0].seconds > 0
    batches = balance.Batches(LENGTHS, planner(capacity=256), micro_batches=2, **INLINE)
    with pytest.raises(ValueError, match="micro_batches must be at least"):
        list(batches)


def test_empty_documents_are_counted_and_in_no_step():
    batches = balance.Batches([5, 0, 7, 0], planner(), **INLINE)
    assert batches.dropped == 2
    assert sorted(i for plan in batches for i in documents_of(plan)) == [0, 2]
    assert list(balance.Batches([], planner(), **INLINE)) == []


WRONG_STATES = [
    ({"version": 2}, "version must be 1"),
    ({"tokens": 5}, "tokens must be 4096"),
    ({"lengths": "x"}, "lengths must be"),
    ({"deferral": 1}, "deferral must be 0"),
    ({"step": 10**6}, "step must be at most"),
    ({"step": -1}, "step must be at least 0"),
    ({"epoch": "two"}, "epoch must be an integer"),
]


@pytest.mark.parametrize(("change", "said"), WRONG_STATES)
def test_a_foreign_state_is_refused_without_effect(change, said):
    batches = balance.Batches(LENGTHS, planner(), **INLINE)
    next(iter(batches))
    before = batches.state_dict()
    with pytest.raises(ValueError, match=said):
        batches.load_state_dict(before | change)
    assert batches.state_dict() == before
    with pytest.raises(ValueError, match="state must be a dict"):
        batches.load_state_dict(None)
    with pytest.raises(ValueError, match="state must have 'epoch'"):
        batches.load_state_dict({name: before[name] for name in before if name != "epoch"})


WRONG = [
    ({"lengths": [3, -1]}, "lengths must not be negative, got -1 at index 1"),
    ({"planner": None}, "planner must be a function"),
    ({"seed": -1}, "seed must be at least 0"),
    ({"tokens": 0}, "tokens must be at least 1"),
    ({"deferral": -1}, "deferral must be at least 0"),
    ({"micro_batches": 0}, "micro_batches must be at least 1"),
    ({"workers": -1}, "workers must be at least 0"),
    ({"ahead": 0}, "ahead must be at least 1"),
]


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_wrong_arguments_are_named(change, said):
    with pytest.raises(ValueError, match=said):
        balance.Batches(**{"lengths": [4], "planner": planner()} | change)


def test_a_planner_that_returns_no_plan_is_named():
    with pytest.raises(ValueError, match=r"planner must return a balance.Plan"):
        list(balance.Batches([4], len, **INLINE))
