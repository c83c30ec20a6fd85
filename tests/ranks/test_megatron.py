"""Megatron-Core's own GPT over context-parallel ranks, on the real package: one rank's numbers."""

import pytest

from seqpar.integrations import megatron
from tests.support.examples import example
from tests.support.megatron import Case, on_rank

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron's own
STEPS, ROWS = 3, 4


CASES = {
    "context": Case(cp=4),
    "context x data": Case(cp=2, strategy="all_gather"),
    "tensor x context": Case(tp=2, cp=2),
    "tensor x data": Case(tp=2, strategy="ulysses"),
    "hierarchical": Case(
        cp=4, config={"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 2]}
    ),
    "documents": Case(cp=2, packing="thd", padded=True),
    "documents dealt by row": Case(cp=4, packing="sbhd", strategy="ring"),
    "documents dealt as one": Case(
        cp=2,
        packing="thd",
        options={"per_sequence_balancing": True},
        model={"position_embedding_type": "learned_absolute"},
    ),
    "windows and sinks": Case(
        cp=2,
        config={"window_size": (5, 0), "window_attn_skip_freq": 2, "softmax_type": "learnable"},
    ),
    "sinks of tensor parallelism": Case(tp=2, cp=2, config={"softmax_type": "off-by-one"}),
    "scheduled": Case(
        packing="thd", hybrid=True, model={"position_embedding_type": "learned_absolute"}
    ),
    "recomputed": Case(
        cp=2,
        tp=2,
        config={
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
    "core attention recomputed": Case(
        cp=4, packing="sbhd", config={"recompute_granularity": "selective"}
    ),
    "scheduled with RoPE": Case(packing="sbhd", hybrid=True),
    "pipeline x context": Case(pp=2, cp=2),
    "documents in a pipeline": Case(pp=2, cp=2, packing="sbhd", strategy="ulysses"),
    "expert x context": Case(cp=4, experts=4, ep=2),
    "expert x context x data": Case(cp=2, experts=4, ep=4),
    "layer scaling": Case(cp=4, config={"apply_query_key_layer_scaling": True}),
}


@pytest.mark.composes(
    "Megatron-Core",
    "`sequence_parallel(spec, strategy)`; Megatron's DDP averages over data and context",
    case="context x data",
    data=2,
    context=2,
    needs="megatron-core",
    equal="losses and weights",
)
@pytest.mark.composes(
    "Megatron-Core",
    "Megatron divides the heads; each rank computes its heads over context",
    case="tensor x context",
    context=2,
    tensor=2,
    needs="megatron-core",
    equal="losses and weights",
)
@pytest.mark.composes(
    "Megatron-Core",
    "the same, with recomputed layers",
    case="recomputed",
    context=2,
    tensor=2,
    needs="megatron-core",
    equal="losses and weights",
)
@pytest.mark.composes(
    "Megatron-Core",
    "data and tensor parallelism alone: one rank has whole sequences",
    case="tensor x data",
    data=2,
    tensor=2,
    needs="megatron-core",
    equal="losses and weights",
)
@pytest.mark.composes(
    "Megatron-Core",
    "USP on two `hierarchical_context_parallel_sizes`",
    case="hierarchical",
    context=4,
    needs="megatron-core",
    equal="losses and weights",
)
@pytest.mark.composes(
    "Megatron-Core",
    "`hybrid_context_parallel`: `PlanScheduler` gives each document 1, 2 or 4 of the 4 ranks",
    case="scheduled",
    context=4,
    needs="megatron-core",
    equal="losses and weights",
)
@pytest.mark.composes(
    "Megatron-Core",
    "all stages get the same documents, as in Megatron's `forward_step`",
    case="pipeline x context",
    pipeline=2,
    context=2,
    needs="megatron-core",
    equal="losses and weights",
)
@pytest.mark.composes(
    "Megatron-Core",
    "the same, with documents of any length in rows",
    case="documents in a pipeline",
    pipeline=2,
    context=2,
    needs="megatron-core",
    equal="losses and weights",
)
@pytest.mark.composes(
    "Megatron-Core",
    "the ranks of context divide the experts: `expert_model_parallel_size`",
    case="expert x context",
    context=4,
    expert=2,
    needs="megatron-core",
    equal="losses and weights",
)
@pytest.mark.composes(
    "Megatron-Core",
    "the ranks of data and context divide the experts",
    case="expert x context x data",
    data=2,
    context=2,
    expert=4,
    needs="megatron-core",
    equal="losses and weights",
)
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_gpt_trains_as_on_one_rank(pool, name):
    case = CASES[name]
    for losses, expected, worst in pool(4, on_rank, case, STEPS, ROWS // case.data):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert worst < 1e-5


def train_the_example(group, context):
    return example("megatron_gpt").train(context)


@pytest.mark.exhaustive
def test_the_example_trains_alike_on_any_number_of_ranks(pool):
    ones, fours = (pool(4, train_the_example, context)[0] for context in (1, 4))
    assert fours == pytest.approx(ones, rel=1e-5) and fours[-1] < fours[0]


def test_megatrons_own_specs_are_replaced():
    from megatron.core.models.gpt import gpt_layer_specs as gpt

    for spec in (gpt.get_gpt_layer_local_spec(), gpt.get_gpt_layer_local_submodules()):
        made = megatron.sequence_parallel(spec)
        layer = getattr(made, "submodules", made)
        core = layer.self_attention.submodules.core_attention
        assert core.module.__name__ == "CoreAttention"
