"""deterministic="ranks": the log-probabilities of completions have the same bits in every batch."""

import pytest
import torch

from seqpar import use_backend
from seqpar.integrations import huggingface
from tests.support import huggingface as hf
from tests.support.ranks import virtual

LENGTHS = (9, 22, 14, 17, 5, 20, 11, 16)  # tokens of each row
RANKS = {"deterministic": "ranks"}


def rows(numbers):
    """The rows with these numbers, padded on the right to the longest one of them."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, hf.VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    longest = max(LENGTHS[i] for i in numbers)
    return {"input_ids": ids[numbers, :longest], "attention_mask": mask[numbers, :longest].long()}


@torch.no_grad()
def log_probabilities(comm, batches, options):
    """By row, the log-probabilities of its tokens, computed in these batches of rows."""
    model = hf.tiny("LlamaForCausalLM")
    sp = huggingface.enable(model, comm, "ring", **options)
    found = {}
    for numbers in batches:
        batch = rows(numbers)
        logits = sp.unshard(model(**sp.shard(batch)).logits)[:, :-1].log_softmax(-1)
        values = logits.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
        found |= {i: x[: LENGTHS[i] - 1] for i, x in zip(numbers, values, strict=True)}
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_training_has_the_log_probabilities_of_the_rollout(ranks):
    """GRPO scores the rows of a rollout in their order, and trains on them in another order."""
    rollout = virtual(1, log_probabilities, [[0, 1, 2, 3], [4, 5, 6, 7]], RANKS)[0]
    for trained in virtual(ranks, log_probabilities, [[6, 1, 3, 4, 0, 7], [5, 2]], RANKS):
        for i, x in rollout.items():
            assert torch.equal(trained[i], x), i


@torch.no_grad()
def generated(comm):
    """Completions, and the logits from which they were chosen.

    In bf16, in contrast to fp32, torch's products with fewer than 4 rows have the same bits too.
    """
    model = hf.tiny("LlamaForCausalLM").bfloat16().eval()
    huggingface.enable(model, comm, "ring", **RANKS)
    batch = rows([0, 3, 4, 6])
    batch = {name: x.flip(1) for name, x in batch.items()}  # padding on the left
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True}
    found = model.generate(**batch, **options, return_dict_in_generate=True)
    return found.sequences, torch.stack(found.logits)


def test_rollouts_are_equal_on_any_number_of_ranks():
    expected = virtual(1, generated)[0]
    for ranks in (2, 3):
        for found in virtual(ranks, generated):
            assert all(map(torch.equal, found, expected))


@torch.no_grad()
def steps_and_training(comm):
    """The logits of completions, by three computations: `generate`, and the training's call with
    positions of tokens and with positions of columns, which count the padding.

    In fp32, torch's products need at least 4 rows for the same bits, so the step has 4 rows.
    """
    model = hf.tiny("LlamaForCausalLM").eval()
    sp = huggingface.enable(model, comm, "ring", **RANKS)
    prompts = {name: x.flip(1) for name, x in rows([0, 1, 3, 4]).items()}
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "eos_token_id": None}
    found = model.generate(**prompts, **options, return_dict_in_generate=True)
    mask = torch.nn.functional.pad(prompts["attention_mask"], (0, 4), value=1)
    batch = {"input_ids": found.sequences, "attention_mask": mask}
    positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    trained = [sp.unshard(model(**sp.shard(batch | x)).logits) for x in (positions, {})]
    return torch.stack(found.logits, 1), *(x[:, -5:-1] for x in trained)


def test_steps_have_the_bits_of_training_with_positions_of_tokens():
    # ATen's kernels add in an order that depends on the number of queries. Triton's interpreter
    # runs in one thread, and virtual ranks are threads.
    with use_backend("triton"):
        ((generated, by_tokens, by_columns),) = virtual(1, steps_and_training)
    assert torch.equal(generated, by_tokens)
    padded = torch.tensor([LENGTHS[i] < max(LENGTHS) for i in (0, 1, 3, 4)])
    assert torch.equal(generated[~padded], by_columns[~padded])
    differences = (generated - by_columns)[padded].abs().amax((1, 2))
    assert ((differences > 0) & (differences < 1e-6)).all()
