"""`make_attention("auto", group)` on real processes: results, agreement, one cluster for all."""

import contextlib
import os
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import seqpar
from seqpar import Layout
from seqpar.auto import measuring
from seqpar.balance import Cluster, Model
from seqpar.core.hooks import set_hooks
from seqpar.costs.profile import machine
from seqpar.strategies.registry import SOFTMAX
from tests.support.calls import local
from tests.support.cases import module
from tests.support.ranks import groups_end

NODES = Cluster.preset("2x2-h100")
DISTANT = replace(NODES, between=replace(NODES.between, rate=1e8))
LAYOUT = Layout.contiguous([0, 1500, 1601], 4)
CALLS = [  # heads, and a window
    ({"heads": 4, "kv_heads": 4}, (-1, -1)),
    ({"heads": 4, "kv_heads": 1}, (-1, -1)),
    ({"heads": 4, "kv_heads": 1}, (3, 0)),
]


def differences(group):
    """The largest difference of results and gradients from Ring's, and what was chosen."""
    options = {"cluster": DISTANT, "strategies": ["ring", "ulysses", "usp"]}
    options["measure"] = False  # whose times would decide
    attn = seqpar.make_attention("auto", group, check_ranks=True, **options)
    ring, found = module("ring", group), []
    for options, window in CALLS:
        results = []
        for each in (attn, ring):
            q, k, v = local(LAYOUT, attn.rank, **options)
            out, lse = each(q, k, v, LAYOUT, causal=True, window_size=window, return_lse=True)
            (out.square().sum() + lse.sum()).backward()
            results.append([out.detach(), lse.detach(), q.grad, k.grad, v.grad])
        worst = max(float((x - y).abs().max()) for x, y in zip(*results, strict=True))
        found.append((worst, str(attn.choice.candidate)))
    keys = local(LAYOUT, attn.rank)[1:]
    q = local(Layout.contiguous([0, 1, 2], 1), 0)[0].detach()
    keys = [x.detach() for x in keys]
    decoded = [x.decode(q, *keys, LAYOUT) for x in (attn, ring)]
    found.append((float((decoded[0] - decoded[1]).abs().max()), "decode"))
    return found, attn.sent_bytes > 0


def test_all_ranks_choose_alike_and_results_are_right(pool):
    answers = pool(4, differences)
    assert all(error <= 1e-12 for found, _ in answers for error, _ in found)
    assert all(sent for _, sent in answers)
    (names,) = {tuple(name for _, name in found) for found, _ in answers}
    assert names[:2] == ("ulysses", "usp 2x2")


def described(group, folders):
    """The cluster that a module has which was given none, and an error of ranks that disagree."""
    rank = torch.distributed.get_rank(group)
    os.environ["SEQPAR_CACHE"] = folders[rank]
    attn = seqpar.make_attention("auto", group)
    cluster = replace(attn.cluster, device=NODES.device if rank else DISTANT.device)
    slow = replace(cluster, host=replace(cluster.host, rate=1e9 + rank))
    other = seqpar.make_attention("auto", group, check_ranks=True, cluster=slow)
    cache = [x.detach() for x in local(Layout.contiguous(8, 2), rank)]
    with pytest.raises(ValueError, match="strategy must be the same on all ranks"):
        other.decode(cache[0][:1], *cache[1:], Layout.contiguous(8, 2))
    return attn.cluster.name


def asked_alone(group):
    """What rank 0 alone asks for is refused there, without the others; a call's fault is not."""
    rank, layout = torch.distributed.get_rank(group), Layout.zigzag(64, 2)
    options = {"cluster": NODES, "strategies": ["ring", "ulysses"]}
    attn = seqpar.make_attention("auto", group, check_ranks=True, **options)
    operands, found = local(layout, rank), []
    if rank == 0:
        for ask in (attn.traffic, attn.mask_area, attn.chosen):
            with pytest.raises(TypeError, match="causal"):
                ask(*operands, layout)
    for _ in range(2):  # the first call, and another
        with pytest.raises(TypeError, match="causal") as raised:
            attn(*operands, layout, **({} if rank == 0 else {"causal": True}))
        found.append(str(raised.value).count("(rank"))
        attn(*operands, layout, causal=True)
    for differs in ({"once": rank == 0}, {"backward": rank == 0}):
        other = seqpar.make_attention("auto", group, check_ranks=True, **options, **differs)
        if rank == 0:
            other.chosen(*operands, layout, causal=True)
        with pytest.raises(ValueError, match="strategy must be the same on all ranks"):
            other(*operands, layout, causal=True)
    return found


def test_differences_found_in_a_call_are_resolved_alone(pool):
    assert pool(2, asked_alone) == [[1, 1]] * 2


def fails_otherwise(group):
    """What all raise if rank 0's device fails in a way of its own, or rank 0 has its own host."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cluster, "here", lambda: (_ for _ in ()).throw(MemoryError("no room")))
        for far in (False, True):
            if far and torch.distributed.get_rank(group) > 0:
                patch.setattr("socket.gethostname", lambda: "far")
            with pytest.raises(ValueError, match=r"^cluster") as raised:
                seqpar.make_attention("auto", group)
            found.append(str(raised.value))
    return found


def test_errors_of_rank_0_are_raised_everywhere(pool):
    for fault, hosts in pool(2, fails_otherwise):
        expected = "cluster must be given, since rank 0 cannot describe its machine: "
        assert fault == f"{expected}MemoryError: no room"
        assert hosts.startswith("cluster must be given where ranks are on several hosts")


def test_default_cluster_is_that_of_rank_0(pool, tmp_path):
    """Rank 1 has another file, which cannot be read."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    name = f"cluster-{machine.machine()}.json"
    replace(NODES, name="that of rank 0").to_json(folders[0] / name)
    (folders[1] / name).write_text("{")
    assert pool(2, described, [str(x) for x in folders]) == ["that of rank 0"] * 2


def compiled(group):
    """The differences of compiled calls from eager ones, with a choice for each layout and once."""
    torch._dynamo.reset()
    worst = []
    for once in (False, True):
        attn = seqpar.make_attention("auto", group, cluster=NODES, once=once)
        calls = [attn, torch.compile(attn, backend="aot_eager", fullgraph=once)]
        for tokens in (40, 56):
            layout, results = Layout.zigzag(tokens, 2), []
            for call in calls:
                q, k, v = local(layout, attn.rank)
                out = call(q, k, v, layout, causal=True)
                out.sum().backward()
                results.append([out.detach(), q.grad, k.grad, v.grad])
            differences = [float((x - y).abs().max()) for x, y in zip(*results, strict=True)]
            worst.append(max(differences))
    return max(worst)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_it_can_be_compiled(pool):
    """Once the choice holds, as a whole graph."""
    assert pool(2, compiled) == [0.0, 0.0]


def pasted(group, codes):
    """What the modules and layouts of recommended code have, run as it is printed."""
    found = []
    for code in codes:
        names = {}
        with groups_end(group):
            exec(code, names)
            attn, layout = names["attn"], names["layout"]
            q, k, v = local(layout, attn.rank)
            attn(q, k, v, layout, causal=True).sum().backward()
        found.append((attn.strategy.name, layout.ranks))
    return found


def test_recommended_code_runs_as_it_is_printed(pool):
    """The pool's default group has 4 ranks."""
    cores = replace(Cluster.preset("1x4-h100"), overlaps=False)
    config = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config |= {"intermediate_size": 64, "vocab_size": 100}
    ways = seqpar.recommend(Model.from_config(config), cores, [100, 20, 20, 7])
    kinds = {(x.strategy == "usp", x.layout_name): x for x in ways if not x.servers}
    codes = [x.code for x in kinds.values()]
    for found in pool(4, pasted, codes):
        assert found == [(x.strategy, 4) for x in kinds.values()]
    assert any("from_spans" in x for x in codes) and any("init_device_mesh" in x for x in codes)


class Recorded:
    """What a trace is told: nothing of measurements."""

    def __init__(self):
        self.labels = []

    def begin(self, label, rank):
        self.labels.append(label)

    def compute(self, *_):
        pass

    def exchange(self, *_):
        return contextlib.nullcontext


def measured_choices(group):
    """How strategies are measured, by a clock that goes on by what each takes on each rank."""
    rank, layout = torch.distributed.get_rank(group), Layout.zigzag(256, 2)
    options = {"cluster": NODES, "strategies": ["ring", "ulysses"], "check_ranks": True}
    found, now, slow = [], [0.0], {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seqpar.auto.module.error_of", lambda cluster: 100.0)
        patch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        for name in ("ring", "ulysses"):
            real = SOFTMAX[name].forward

            def forward(self, *args, real=real, name=name, **kwargs):
                now[0] += 0.25 + slow[name]
                return real(self, *args, **kwargs)

            patch.setattr(SOFTMAX[name], "forward", forward)
        for best in ("ulysses", "ring"):
            slow |= {"ring": 0.0, "ulysses": 0.0}
            slow["ring" if best == "ulysses" else "ulysses"] = 0.5 * rank
            attn = seqpar.make_attention("auto", group, **options)
            operands = local(layout, rank, heads=4, kv_heads=4)
            if rank == 0:  # what it asks alone holds for no call
                attn.chosen(*operands, layout, causal=True)
            trace = Recorded()
            with set_hooks(traces=(trace,)):
                out, _ = attn(*operands, layout, causal=True, return_lse=True)
            assert trace.labels == [f"{best} forward"]
            assert attn.choice.strategy == best
            first, second = attn.choice.ranked
            assert (first.measured, second.measured) == (0.25, 0.75) and not first.why_not
            assert second.why_not == "200.0% slower, as measured"
            if rank == 0:
                del layout  # another one that is equal: nothing is measured again
                layout = Layout.zigzag(256, 2)
            sent = attn.sent_bytes
            again = attn(*operands, layout, causal=True)
            assert attn.sent_bytes - sent < sent / 2 and torch.equal(again, out)
            assert attn.chosen(*operands, layout, causal=True).strategy.name == best
            (grad,) = torch.autograd.grad(again.sum(), operands[0])
            found.append((attn.choice, float(grad.norm()) > 0))
        slow |= {"ring": 0.0, "ulysses": 0.5}
        tried = seqpar.make_attention("auto", group, **options, once=True)
        operands = local(layout, rank, heads=4, kv_heads=4)
        for replaced in ({"skip_messages": True}, {"replace_compute": lambda area: None}, {}):
            with set_hooks(**replaced):  # as `exposure` does: a call then takes what it never does
                tried(*operands, layout, causal=True)
            assert (tried.choice.ranked[0].measured is None) == bool(replaced)
        with torch.inference_mode():
            operands = [x.clone() for x in operands]
            tried(*operands, layout, causal=True)
        later = seqpar.make_attention("auto", group, **options)
        later(*operands, layout, causal=True)
        assert later.choice.ranked[0].measured
        plain = seqpar.make_attention("auto", group, **options, measure=False)
        plain(*local(layout, rank, heads=4, kv_heads=4), layout, causal=True)
        assert all(x.measured is None for x in plain.choice.ranked)
        fixed = seqpar.make_attention("auto", group, **options, once=True)
        operands = local(layout, rank, heads=4, kv_heads=4)
        if rank == 0:
            fixed.chosen(*operands, layout, causal=True)
        for tokens in (256, 64):
            other = Layout.zigzag(tokens, 2)
            fixed(*local(other, rank, heads=4, kv_heads=4), other, causal=True)
            assert fixed.choice.strategy == "ring" and fixed.choice.ranked[0].measured
        lone = seqpar.make_attention("auto", group, **options, once=True, measure=False)
        alone = lone.chosen(*operands, layout, causal=True) and lone.choice if rank == 0 else None
        lone(*local(other, rank, heads=4, kv_heads=4), other, causal=True)
        assert lone.choice is not alone  # of a rank that other ranks do not know
    return found


def checkpointed(group, measure):
    """Gradients of the first call with a layout, without a checkpoint and in each kind of one."""
    options = {"cluster": NODES, "strategies": ["ring", "ulysses"], "measure": measure}
    found = []
    for i, recompute in enumerate(CHECKPOINTS):
        attn = seqpar.make_attention("auto", group, **options)
        layout = Layout.zigzag(64 + 4 * i, 2)  # which no other has been called with
        q = local(layout, attn.rank, heads=2, kv_heads=2)[0]

        def call(x, attn=attn, layout=layout):
            return attn(x * 1.5, x * 0.5, x * 2.0, layout, causal=True).square().sum()

        with mock.patch("seqpar.auto.module.error_of", return_value=10.0):  # all are close
            grads = [torch.autograd.grad(each(call, q), q)[0] for each in (recompute, plainly)]
        assert (attn.choice.ranked[0].measured is not None) == measure
        found.append(bool(torch.equal(*grads)))
    return found


def plainly(function, x):
    return function(x)


def by_torch(function, x):
    return torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)


CHECKPOINTS = (plainly, by_torch, seqpar.checkpoint)


@pytest.mark.parametrize("measure", [pytest.param(True, marks=pytest.mark.exhaustive), False])
def test_choices_leave_nothing_in_a_checkpoint(pool, measure):
    assert pool(2, checkpointed, measure) == [[True] * len(CHECKPOINTS)] * 2


def test_close_predictions_are_measured_on_all_ranks(pool):
    """The slowest rank counts, and all choose alike."""
    first, second = pool(2, measured_choices)
    assert first == second and len(first) == 2
