# torchrun --nproc-per-node 2 examples/huggingface_dpo.py (no GPU needed)
"""Train on preferences with TRL's DPOTrainer; all ranks divide the tokens of each sample."""

import torch
import torch.distributed as dist
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models
from trl import DPOConfig, DPOTrainer

from seqpar.integrations import huggingface


def make_tokenizer():
    """Return a tokenizer of bytes. Use AutoTokenizer.from_pretrained(...) for a real model."""
    words = {f"<{i}>": i for i in range(4)} | {f"<0x{i:02X}>": i + 4 for i in range(256)}
    model = models.BPE(vocab=words, merges=[], byte_fallback=True)
    special = {"pad_token": "<0>", "bos_token": "<1>", "eos_token": "<2>", "unk_token": "<3>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **special)


def make_model():
    config = transformers.LlamaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.set_seed(0)  # the same weights on every rank
    return transformers.LlamaForCausalLM(config)


def make_arguments(folder, steps=10):
    """Return the trainer's arguments. Under torchrun, this also makes the process group."""
    return DPOConfig(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        max_length=512,
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )


def train(arguments, group):
    """Train on a group's ranks, or on one process without a group. Returns the trainer."""
    model, reference, kind = make_model(), make_model(), DPOTrainer
    if group is not None:
        huggingface.enable(model, group)
        huggingface.enable(reference, group)
        kind = huggingface.trainer(DPOTrainer)
    numbers = range(40)
    samples = {
        "prompt": [f"The square of {i} is " for i in numbers],
        "chosen": [f"{i * i}." for i in numbers],
        "rejected": [f"{i * i + 1}, or so I think." for i in numbers],
    }
    trainer = kind(
        model=model,
        ref_model=reference,
        args=arguments,
        train_dataset=Dataset.from_dict(samples),
        processing_class=make_tokenizer(),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    arguments = make_arguments("dpo-out")
    trainer = train(arguments, dist.group.WORLD)
    if dist.get_rank() == 0:
        print([x["loss"] for x in trainer.state.log_history if "loss" in x])
    dist.barrier()
    dist.destroy_process_group()
