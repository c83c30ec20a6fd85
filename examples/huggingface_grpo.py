# torchrun --nproc-per-node 2 examples/huggingface_grpo.py (no GPU needed)
"""Compare GRPO on all ranks with GRPO on one process.

The ranks and the one process train for two steps on the same completions. The program compares the
log-probability of each token, the loss, and the gradients of all parameters.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers

from seqpar.integrations import huggingface

PROMPTS, COMPLETIONS, TOKENS, VOCABULARY = 2, 4, 48, 64  # completions of each prompt
NAMES = ("labels", "advantages", "weights")  # not arguments of the model


def models():
    """Return the policy and the reference model, which is the policy before a small change."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.set_seed(0)  # the same weights on every rank
    policy = transformers.LlamaForCausalLM(config)
    reference = copy.deepcopy(policy)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(torch.randn_like(p), alpha=0.02)
    return policy, reference


def completions():
    """Return a batch like one after sampling, with padding before prompts and after completions.

    An entry of `advantages` and `weights` belongs to the next token, which its position predicts.
    """
    rows = PROMPTS * COMPLETIONS
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (rows, TOKENS), generator=generator)
    starts = torch.randint(8, (PROMPTS, 1), generator=generator).repeat_interleave(COMPLETIONS, 0)
    stops = torch.randint(24, TOKENS + 1, (rows, 1), generator=generator)
    column = torch.arange(TOKENS)
    completion = (column >= 16) & (column < stops)
    rewards = torch.rand((PROMPTS, COMPLETIONS), generator=generator)
    deviations = rewards - rewards.mean(1, keepdim=True)
    advantages = (deviations / (rewards.std(1, keepdim=True) + 1e-4)).view(rows, 1)
    predicts = F.pad(completion[:, 1:], (0, 1))
    return {
        "input_ids": ids,
        "attention_mask": ((column >= starts) & (column < stops)).long(),
        "labels": ids.masked_fill(~completion, -100),
        "advantages": advantages.expand(rows, TOKENS),
        "weights": predicts
        / (rows * predicts.sum(1, keepdim=True)),  # the mean over rows of each row's mean
    }


def log_probabilities(model, inputs, labels):
    """Return the log-probability of each label, (1, T_local); 0 without a label."""
    logits = model(**inputs).logits.float()
    return -F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(
        labels
    )


def grpo(new, old, reference, advantages, weights, clip=0.2, beta=0.04):
    """Return the sum of the tokens' losses: a clipped ratio, and a penalty on the distance from
    the reference.
    """
    ratio = (new - old).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    away = (reference - new).exp() - (reference - new) - 1
    return -((gain - beta * away) * weights).sum()


def train(policy, reference, inputs, labels, advantages, weights, total, average):
    """Take two steps. Returns the log-probabilities, loss and gradients of the last one."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.3)
    with torch.no_grad():
        old = log_probabilities(policy, inputs, labels)
        kept = log_probabilities(reference, inputs, labels)
    for _ in range(2):
        optimizer.step()  # no effect in the first step, which has no gradients yet
        optimizer.zero_grad()
        new = log_probabilities(policy, inputs, labels)
        loss = total(grpo(new, old, kept, advantages, weights))
        loss.backward()
        average()
    return new.detach(), loss.detach(), [p.grad for p in policy.parameters()]


def one_process():
    batch = completions()
    labels, *parts = (batch.pop(name) for name in NAMES)
    labels = F.pad(labels[:, 1:], (0, 1), value=-100)  # next tokens, as `shard` makes them
    return train(*models(), batch, labels, *parts, total=lambda loss: loss, average=lambda: None)


def on_ranks(group, strategy="ring"):
    policy, reference = models()
    sp = huggingface.enable(policy, group, strategy)
    huggingface.enable(reference, group, strategy)
    local = sp.shard(completions())
    parts = [local.pop(name) for name in NAMES]  # of this rank's tokens
    new, loss, gradients = train(
        policy, reference, local, *parts, total=sp.total, average=sp.average_gradients
    )
    return sp.unshard(new, local), loss, gradients


def largest_error(group, strategy="ring"):
    """Return the largest difference from one process: of log-probabilities, loss and gradients."""
    mine, loss, gradients = on_ranks(group, strategy)
    expected, expected_loss, expected_gradients = one_process()
    pairs = [(mine, expected), (loss, expected_loss)]
    pairs += zip(gradients, expected_gradients, strict=True)
    return max(float((x - y).abs().max()) for x, y in pairs)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    error = largest_error(dist.group.WORLD)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {error=:.1e}")
    assert error < 1e-5
    dist.barrier()
    dist.destroy_process_group()
