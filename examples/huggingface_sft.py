# torchrun --nproc-per-node 2 examples/huggingface_sft.py (no GPU needed)
"""Fine-tune a model with TRL's SFTTrainer; all ranks divide the tokens of packed samples."""

import torch
import torch.distributed as dist
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models
from trl import SFTConfig, SFTTrainer

from seqpar.integrations import huggingface


def make_tokenizer():
    """Return a tokenizer of bytes. Use AutoTokenizer.from_pretrained(...) for a real model."""
    words = {f"<{i}>": i for i in range(4)} | {f"<0x{i:02X}>": i + 4 for i in range(256)}
    model = models.BPE(vocab=words, merges=[], byte_fallback=True)
    special = {"pad_token": "<0>", "bos_token": "<1>", "eos_token": "<2>", "unk_token": "<3>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **special)


def make_arguments(folder, steps=10):
    """Return the trainer's arguments. Under torchrun, this also makes the process group."""
    return SFTConfig(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        packing=True,  # with "bfd", which packs whole samples as separate documents
        max_length=512,
        max_steps=steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )


def train(arguments, group):
    """Train on a group's ranks, or on one process without a group. Returns the trainer."""
    config = transformers.LlamaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.set_seed(0)  # the same weights on every rank
    model = transformers.LlamaForCausalLM(config)
    texts = [f"The square of {i} is {i * i}. " * (1 + i % 9) for i in range(640)]
    kind = SFTTrainer
    if group is not None:
        huggingface.enable(model, group)  # the two lines
        kind = huggingface.trainer(SFTTrainer)
    trainer = kind(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=make_tokenizer(),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    arguments = make_arguments("sft-out")
    trainer = train(arguments, dist.group.WORLD)
    if dist.get_rank() == 0:
        print([x["loss"] for x in trainer.state.log_history if "loss" in x])
    dist.barrier()
    dist.destroy_process_group()
