"""The code of recommendations that divide devices runs on real processes."""

import functools

import numpy as np
import pytest
import torch

import seqpar
from seqpar import Layout
from seqpar.comm.messages.comm import Comm
from seqpar.simulate.recommendations.divisions import divisions
from seqpar.simulate.recommendations.ways import ways_of
from tests.support.calls import local
from tests.support.ranks import groups_end
from tests.unit.simulate.recommendations.test_divisions import LENGTHS
from tests.unit.simulate.steps.test_training_step import CLUSTER, MODEL


def run(group, code):
    """Return this rank's data group, its documents, and the largest error of its attention."""
    with groups_end(group):
        return run_code(group, code)


@functools.cache
def alone(cu_seqlens):
    """The attention of one process."""
    layout = Layout.contiguous(cu_seqlens, 1)
    with torch.no_grad():
        return seqpar.RingAttention(Comm("one", 0, 1))(*local(layout, 0), layout, causal=True)


def run_code(group, code):
    names = {}
    exec(code.replace('"cuda"', '"cpu"'), names)
    attn, errors = names["attn"], []
    for layout in names["layouts"]:
        expected = alone(tuple(map(int, layout.cu_seqlens)))
        with torch.no_grad():
            out = attn(*local(layout, attn.rank), layout, causal=True)
        errors.append(float((out - layout.shard(expected, attn.rank)).abs().max()))
    return names["mesh"].get_local_rank("data"), names["batches"], max(errors)


def ways():
    """One way for each division of four devices, of different strategies and layouts."""
    costs, found = seqpar.balance.Costs(CLUSTER, MODEL), []
    for i, division in enumerate(divisions(np.array(LENGTHS), costs)):
        first, others = (ways_of(division, costs, x) for x in (False, True))
        made = [*first, *others]
        found.append(made[(7 * i) % len(made)])
    return found


@pytest.mark.composes(
    "PyTorch",
    "groups of documents from `seqpar.recommend`: each group has its own ranks",
    data=2,
    context=2,
    equal="out",
)
@pytest.mark.exhaustive
def test_the_code_of_divisions_attends_to_all_documents(pool):
    tried = ways()
    kinds = {(x.strategy, x.layout_name in ("zigzag", "contiguous")) for x in tried}
    assert len(kinds) >= 4
    for way in tried:
        answers = pool(4, run, way.code)
        held = {data: batches for data, batches, _ in answers}
        documents = [i for batches in held.values() for batch in batches for i in batch]
        assert sorted(documents) == [i for i, n in enumerate(LENGTHS) if n], way.name
        assert max(error for _, _, error in answers) <= 1e-12, way.name
