# torchrun --nproc-per-node 2 examples/verl_engine.py (needs verl, and a GPU for each process)
"""Fine-tune with verl's FSDP engine. The tokens of each sequence are divided among all ranks.

The program makes an engine and calls it as verl's trainers do. With a trainer of verl, set only the
two environment variables.
"""

import argparse
import functools
import json
import os
import tempfile

import torch
import torch.distributed as dist
import transformers

STEPS = 4
LENGTHS = (17, 2, 40, 29)  # tokens of each sequence: no multiples of the number of ranks
PROMPTS = (5, 1, 8, 28)  # tokens without a loss, at the beginning of each sequence


def make_model():
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=3,  # verl's own engine requires a multiple of the number of ranks
        num_key_value_heads=3,
    )
    transformers.set_seed(0)  # the same weights on every rank
    return transformers.LlamaForCausalLM(config)


def sequences(step):
    """Return the ids of each sequence."""
    return [(torch.arange(n) * (step + 1) + n) % 64 for n in LENGTHS]


def make_engine(folder, ranks):
    """Return an engine for the model in a folder. `ranks` ranks share each sequence."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.base import EngineRegistry

    return EngineRegistry.new(
        "language_model",
        "fsdp2",
        model_config=HFModelConfig(
            path=folder,
            load_tokenizer=False,
            override_config={"attn_implementation": "sdpa"},
            enable_gradient_checkpointing=False,
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            ulysses_sequence_parallel_size=ranks,
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
            use_torch_compile=False,
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=0.3,
            weight_decay=0.0,
            clip_grad=100.0,
            total_training_steps=STEPS,
            optimizer="SGD",
            optimizer_impl="torch.optim",
        ),
        checkpoint_config=CheckpointConfig(),
    )


def packed(step):
    """Return a batch of verl's own data class."""
    from verl.utils import tensordict_utils

    of_prompts = [torch.arange(n) >= p for n, p in zip(LENGTHS, PROMPTS, strict=True)]
    tensors = {
        "input_ids": sequences(step),
        "position_ids": [torch.arange(n) for n in LENGTHS],
        "loss_mask": [x.long() for x in of_prompts],
    }
    nested = {
        name: torch.nested.as_nested_tensor(x, layout=torch.jagged) for name, x in tensors.items()
    }
    settings = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 48, "temperature": 1.0}
    settings |= {"use_remove_padding": True, "pad_mode": "no_padding"}
    return tensordict_utils.get_tensordict(nested, settings)


def train(folder, ranks):
    """Train the model in a folder. Returns each step's loss."""
    from verl.workers.utils.losses import sft_loss

    engine = make_engine(folder, ranks)
    engine.initialize()
    losses = []
    for step in range(STEPS):
        with engine.train_mode():
            result = engine.train_batch(packed(step), functools.partial(sft_loss, None))
        losses.append(sum(result["loss"]))
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="ring", help="as in seqpar.make_attention")
    strategy = parser.parse_args().strategy
    os.environ["VERL_ENGINE_DEVICE"] = "seqpar"  # before verl is imported
    os.environ["SEQPAR_VERL"] = json.dumps({"strategy": strategy})
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    with tempfile.TemporaryDirectory() as folder:
        make_model().save_pretrained(folder)
        losses = train(folder, dist.get_world_size())
    print(f"rank {dist.get_rank()}: " + " ".join(f"{x:.4f}" for x in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
