"""accelerate's ParallelismConfig: its loader, mesh and FSDP2 with seqpar's attention."""

import copy

import numpy as np
import pytest
import torch
import transformers

from seqpar import Layout, parity
from seqpar.integrations import accelerate, huggingface
from tests.support import huggingface as hf
from tests.support.examples import example
from tests.support.ranks import device_mesh, hide_from_collector

pytest.importorskip("accelerate", reason="accelerate is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # accelerate's, transformers' and torch's own


def on_cpu(**options):
    """An Accelerator that shards on CPUs. accelerate itself does so on GPUs and the like only."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    AcceleratorState._reset_state(True)
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return Accelerator(cpu=True, **options)


def whole(x):
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def steps(group, ranks, strategy):
    """The losses of the example's steps and the weights after them, and the mesh of the weights."""
    hf.launched(group)
    program = example("accelerate_fsdp2")
    accelerator = on_cpu(**program.settings(ranks, group.size() // ranks))
    losses, model = program.train(accelerator, strategy)
    weights = {name: whole(x) for name, x in model.named_parameters()}
    names = {x.device_mesh.mesh_dim_names for x in model.parameters()}
    return losses, weights, names


def alone():
    """The losses and weights of the unmodified model on one process."""
    program = example("accelerate_fsdp2")
    model, losses = program.make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rows = [torch.tensor([x["input_ids"]]) for x in program.samples()]
    per_step = program.ACCUMULATE * program.BATCH
    for first in range(0, len(rows), per_step):
        step = rows[first : first + per_step]
        labels = sum(x.shape[1] - 1 for x in step)
        found = sum(model(input_ids=x, labels=x, num_items_in_batch=labels).loss for x in step)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(found))
    return losses, {name: x.detach() for name, x in model.named_parameters()}


@pytest.fixture(scope="module")
def pool(pool):
    yield pool
    pool(4, hide_from_collector)


@pytest.mark.composes(
    "accelerate",
    "`sequence_mesh(accelerator)` before `prepare`, with `dp_shard_size=2, cp_size=2`",
    case="2-ring",
    data=2,
    context=2,
    FSDP=4,
    equal="losses and weights",
)
@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "strategy"), [(2, "ring"), (4, "ulysses")])
def test_fsdp2_over_shards_and_sequences_trains_as_one_process(pool, ranks, strategy):
    losses, weights = alone()
    for found, of_ranks, names in pool(4, steps, ranks, strategy):
        assert names == {("dp_shard_cp",)}
        assert found == pytest.approx(losses, abs=2e-5)
        for name, x in weights.items():
            torch.testing.assert_close(of_ranks[name], x, rtol=1e-4, atol=2e-5)


def loaded(group):
    """The first tokens of each batch that accelerate's own loader gives this rank."""
    hf.launched(group)
    program = example("accelerate_fsdp2")
    accelerator = on_cpu(**program.settings(2, 2))
    accelerate.sequence_mesh(accelerator)
    dataset = [torch.tensor([i]) for i in range(8)]
    loader = accelerator.prepare(torch.utils.data.DataLoader(dataset, 1))
    return [int(x) for x in loader]


def test_ranks_of_a_sequence_read_the_same_batches(pool):
    first, second = [0, 2, 4, 6], [1, 3, 5, 7]
    assert pool(4, loaded) == [first, first, second, second]


def of_trainer(group, folder, ranks, cp_size):
    """The losses of a Trainer, on one process without a group."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    program = example("accelerate_fsdp2")
    model, base, options = program.make_model(), transformers.Trainer, {}
    if group is not None:
        hf.launched(group)
        AcceleratorState._reset_state(True)
        sizes = program.settings(cp_size, group.size() // cp_size)["parallelism_config"]
        plugin = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        plugin |= {"cpu_ram_efficient_loading": False}
        options = {"parallelism_config": sizes, "fsdp": True, "fsdp_config": plugin}
        base = huggingface.trainer(base)
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=3,
        per_device_train_batch_size=4 if group is None else 4 * ranks // group.size(),
        gradient_accumulation_steps=2,
        logging_steps=1,
        learning_rate=0.3,
        optim="sgd",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    if group is not None:
        arguments.device  # noqa: B018  makes the state, as `Trainer` does
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        huggingface.enable(
            model, device_mesh(group.size() // ranks, ranks, names=("dp", "sp"))["sp"]
        )
    trainer = base(
        model=model,
        args=arguments,
        data_collator=huggingface.Collator(),
        train_dataset=program.samples(),
    )
    trainer.train()
    return [x["loss"] for x in trainer.state.log_history if "loss" in x]


@pytest.mark.composes(
    "Trainer and TRL",
    "`TrainingArguments(parallelism_config=...)` with `cp_size`, and FSDP2",
    data=2,
    context=2,
    FSDP=4,
    equal="losses",
)
@pytest.mark.exhaustive
def test_a_trainer_takes_the_sizes(pool, tmp_path):
    expected = of_trainer(None, str(tmp_path), 1, 1)
    for found in pool(4, of_trainer, str(tmp_path), 2, 2):
        assert found == pytest.approx(expected, abs=2e-5)


def trainer_of_other_ranks(group, folder):
    return hf.refused(lambda: of_trainer(group, folder, 2, 4))


@pytest.mark.composes(
    "Trainer and TRL",
    "enable the model on the ranks that `cp_size` names",
    data=2,
    context=2,
    refused="cp_size must share sequences among the model's ranks",
)
def test_a_trainer_refuses_other_ranks(pool, tmp_path):
    for told in pool(4, trainer_of_other_ranks, str(tmp_path)):
        assert "cp_size must share sequences among the model's ranks" in told


def refusals(group):
    hf.launched(group)
    program = example("accelerate_fsdp2")
    plain = on_cpu(**program.settings(1, 4))
    told = [hf.refused(lambda: accelerate.sequence_mesh(plain))]
    accelerator = on_cpu(**program.settings(2, 2))
    model = program.make_model()
    prepared = copy.copy(accelerator)
    prepared._models = [model]
    told.append(hf.refused(lambda: accelerate.sequence_mesh(prepared)))
    mesh = accelerate.sequence_mesh(accelerator)
    assert accelerate.sequence_mesh(accelerator) is mesh or mesh.size() == 2
    told.append(hf.refused(lambda: accelerator.maybe_context_parallel()))
    return told


@pytest.mark.composes(
    "accelerate",
    "call `sequence_mesh` before `accelerator.prepare`",
    data=2,
    context=2,
    refused="accelerator must not have prepared a model",
)
def test_what_cannot_be_shared_is_refused(pool):
    for size, prepared, cut in pool(4, refusals):
        assert "accelerator must have a cp_size of at least 2, got 1" in size
        assert "accelerator must not have prepared a model" in prepared
        assert "maybe_context_parallel must not be called" in cut


def test_other_objects_are_refused():
    with pytest.raises(ValueError, match="accelerator must have a cp_size of at least 2, got None"):
        accelerate.sequence_mesh(transformers.LlamaConfig())


def record_a_step(folder, model, batch, **where):
    with parity.record(folder, model, **where):
        model(**batch, use_cache=False).loss.backward()


def recorded_on_rank(group, folder):
    """One batch over 2 ranks, whose weights FSDP2 shards; the other 2 ranks do the same."""
    hf.launched(group)
    accelerator = on_cpu(**example("accelerate_fsdp2").settings(2, 2))
    mesh = accelerate.sequence_mesh(accelerator)
    model, of = hf.tiny("LlamaForCausalLM"), hf.batch("padded")
    sp = huggingface.enable(model, mesh, "ring")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, _ = accelerator.prepare(model, optimizer)
    borders = np.r_[0, of["attention_mask"].sum(1).cumsum(0).numpy()]
    layout = Layout.zigzag(borders, mesh.size(), equal=True)
    part = sp.shard(of, layout)
    record_a_step(folder, model, part, group=mesh.get_group(), layout=layout)


@pytest.mark.exhaustive
def test_a_recording_of_a_sharded_step_agrees_with_one_process(pool, tmp_path):
    record_a_step(tmp_path / "one", hf.tiny("LlamaForCausalLM"), hf.batch("padded"))
    pool(4, recorded_on_rank, tmp_path / "four")
    report = parity.compare(tmp_path / "one", tmp_path / "four")
    assert report.first is None, str(report)
    assert {"output", "loss", "gradient of output", "gradient"} <= {
        x.stage for x in report.findings
    }
