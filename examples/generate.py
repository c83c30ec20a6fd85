# torchrun --nproc-per-node 2 examples/generate.py (no GPU needed)
"""Generate with a transformers model, with the prompt and its keys divided among all ranks."""

import argparse
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from seqpar.integrations import huggingface

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a name or a folder (default: a tiny Llama of random weights)")
parser.add_argument("--attention", default="ring", help="the strategy of the prefill")
parser.add_argument("--prompt", type=int, default=4096, help="tokens of the prompt, at most")
parser.add_argument("--tokens", type=int, default=32, help="new tokens")
parser.add_argument("--sample", action="store_true", help="sample tokens, the same on all ranks")
options = parser.parse_args()

if torch.cuda.is_available():
    torch.cuda.set_device(dist.get_node_local_rank(0))
dist.init_process_group()
rank, device = dist.get_rank(), "cuda" if torch.cuda.is_available() else "cpu"
text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text()
if options.model:
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : options.prompt]
else:
    transformers.set_seed(0)  # the same weights on every rank
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=1 << 20,
        eos_token_id=None,
    )
    model, tokenizer = transformers.LlamaForCausalLM(config), None
    ids = torch.tensor([list(text.encode()[: options.prompt])])

model = model.eval().to(device)
sp = huggingface.enable(model, dist.group.WORLD, options.attention)
cache = sp.cache(reserve=options.tokens)
begin = time.perf_counter()
with torch.no_grad():  # a separate prefill, so that it can be timed; generate would do it too
    model(input_ids=ids[:, :-1].to(device), past_key_values=cache, logits_to_keep=1)
middle = time.perf_counter()
tokens = model.generate(
    ids.to(device), past_key_values=cache, max_new_tokens=options.tokens, do_sample=options.sample
)[0, ids.shape[1] :].tolist()
seconds = (time.perf_counter() - middle) / max(1, len(tokens))
if rank == 0:
    print(tokenizer.decode(tokens) if tokenizer else tokens)
    print(f"prefill {middle - begin:.2f} s, then {1e3 * seconds:.1f} ms per token")
    report = sp.report()
    print(f"{report.step_bytes // max(1, len(tokens)):,} bytes per token to the other ranks")
print(f"rank {rank}: {cache.store.layout.tokens_on(rank)} of {cache.store.length} keys")
dist.destroy_process_group()
