"""transformers' Trainer with FSDP, a GPU for each rank: on a CPU accelerate makes it DDP."""

import importlib.util
import os
import tempfile

import pytest
import torch
import torch.distributed as dist

RANKS = 2
missing = [x for x in ("transformers", "accelerate") if importlib.util.find_spec(x) is None]
pytestmark = [
    pytest.mark.skipif(
        torch.cuda.device_count() < RANKS or bool(missing),
        reason=f"needs {RANKS} GPUs on one machine, transformers and accelerate",
    ),
    pytest.mark.filterwarnings("ignore"),
]
CASES = {  # options of the Trainer, and the relative tolerance of losses
    "FSDP2": ({"fsdp": True, "fsdp_config": {"version": 2}}, 1e-4),
    "FSDP2, bf16": ({"fsdp": True, "fsdp_config": {"version": 2}, "bf16": True}, 2e-2),
    "FSDP1": ({"fsdp": True, "fsdp_config": {"version": 1}}, 1e-4),
    "FSDP1, bf16": ({"fsdp": True, "fsdp_config": {"version": 1}, "bf16": True}, 2e-2),
}


def train(folder, group, **options):
    """(the classes around the model, the losses of three steps) of a Trainer."""
    import transformers

    from seqpar.integrations import huggingface
    from tests.support import huggingface as hf

    model, kind = hf.tiny("LlamaForCausalLM"), transformers.Trainer
    if group is not None:
        huggingface.enable(model, group)
        kind = huggingface.trainer(kind)
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_strategy="no",
        optim="sgd",
        learning_rate=0.3,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    ids = torch.randint(3, hf.VOCABULARY, (12, 24), generator=torch.Generator().manual_seed(7))
    rows = [{"input_ids": x, "labels": x} for x in ids]
    trainer = kind(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    losses = [x["loss"] for x in trainer.state.log_history if "loss" in x]
    found = trainer.model_wrapped
    return {type(x).__name__ for x in (found, *found.modules())}, losses


def be_a_rank(rank, store, folder, options, answers):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    file = dist.FileStore(store, RANKS)
    dist.init_process_group("nccl", store=file, rank=rank, world_size=RANKS, device_id=device)
    answers.put(train(folder, dist.group.WORLD, **options))
    dist.destroy_process_group()


@pytest.mark.composes(
    "Trainer and TRL",
    "`TrainingArguments(fsdp=...)`",
    context=2,
    FSDP=2,
    needs="2 GPUs",
    has_run=False,
    equal="losses",
)
@pytest.mark.parametrize("case", CASES)
def test_a_trainer_with_fsdp_has_the_losses_of_one_process(case):
    options, tolerance = CASES[case]
    answers = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        _, expected = train(folder, None, use_cpu=True)
        arguments = f"{folder}/store", folder, options, answers
        torch.multiprocessing.spawn(be_a_rank, arguments, RANKS)
    for _ in range(RANKS):
        kinds, losses = answers.get()
        assert any(kind.startswith(("FSDP", "FullyShardedDataParallel")) for kind in kinds)
        assert losses == pytest.approx(expected, rel=tolerance)
