# torchrun --nproc-per-node 2 examples/huggingface_finetune.py (no GPU needed)
"""Train a transformers model with its Trainer; all ranks divide the tokens of each sample."""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from seqpar.integrations import huggingface

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a name or a folder (default: a tiny Llama that reads bytes)")
parser.add_argument("--attention", default="ring", help="the strategy")
parser.add_argument("--tokens", type=int, default=1024, help="tokens per sample, at most")
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()

arguments = transformers.TrainingArguments(
    output_dir="huggingface-out",
    use_cpu=not torch.cuda.is_available(),
    max_steps=options.steps,
    per_device_train_batch_size=2,
    learning_rate=3e-3,
    lr_scheduler_type="constant",
    logging_steps=5,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    ddp_find_unused_parameters=False,
)  # this makes the process group
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:64]
if options.model:
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    samples = [{"text": file.read_text()} for file in files]
else:
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.set_seed(0)  # the same weights on every rank
    model, tokenizer = transformers.LlamaForCausalLM(config), None
    samples = [{"input_ids": list(file.read_bytes()[: options.tokens])} for file in files]

sp = huggingface.enable(model, dist.group.WORLD, options.attention)
trainer = huggingface.trainer(transformers.Trainer)(
    model=model,
    args=arguments,
    train_dataset=samples,
    data_collator=huggingface.Collator(tokenizer, max_length=options.tokens),
)
trainer.train()
if dist.get_rank() == 0:
    print(sp.report())
dist.barrier()
dist.destroy_process_group()
