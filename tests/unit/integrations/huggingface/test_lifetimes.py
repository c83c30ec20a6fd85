"""What a call of an enabled model leaves behind: no layout, batch or record of the call."""

import copy
import gc
from functools import partial

import pytest
import torch

from seqpar import Layout
from seqpar.integrations import huggingface
from seqpar.integrations.huggingface.attention.call import ModelCall
from seqpar.integrations.huggingface.batch.sharding import Sharding, Side
from seqpar.integrations.huggingface.generate.cache import Cache
from tests.support import generation, images
from tests.support import huggingface as hf
from tests.support.ranks import virtual

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
OF_A_CALL = Cache, Layout, ModelCall, Sharding, Side
CONVOLUTION = {"layer_types": ["conv", "full_attention"]}


def alive():
    gc.collect()
    return {id(x): x for x in gc.get_objects() if isinstance(x, OF_A_CALL)}


def train(sp, of):
    sp.model(**sp.shard(of)).loss.backward()


def in_checkpoints(sp, of):
    sp.model.gradient_checkpointing_enable({"use_reentrant": False})
    train(sp, of)


def with_images(sp, of):
    train(sp, images.batch("left", "types", 4))


@torch.no_grad()
def evaluate(sp, of):
    sp.model.eval()
    sp.unshard(sp.model(**sp.shard(of)))


def total(sp, of):
    local = sp.shard({name: x for name, x in of.items() if name != "labels"})
    sp.total(sp.model(**local).logits.square().sum()).backward()


def generate(sp, of):
    sp.model.eval().generate(**generation.prompts((0, 7)), max_new_tokens=2)


@torch.no_grad()
def decode(sp, of):
    sp.model.eval()
    cache = sp.cache()
    for ids in of["input_ids"].split(11, dim=1):
        sp.model(input_ids=ids, past_key_values=cache)


def refuse(sp, of):
    part = sp.shard(of)
    assert hf.refused(lambda: sp.model(**part, output_attentions=True))


def fail(sp, of):
    handle = sp.model.model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sp.model(**sp.shard(of))
    handle.remove()


LLAMA = partial(hf.tiny, "LlamaForCausalLM")
WAYS = {
    "training": (LLAMA, train),
    "checkpoints": (LLAMA, in_checkpoints),
    "a loss with total": (LLAMA, total),
    "evaluation": (LLAMA, evaluate),
    "generation": (LLAMA, generate),
    "a cache": (LLAMA, decode),
    "refused calls": (LLAMA, refuse),
    "calls that fail": (LLAMA, fail),
    "chunks": (partial(hf.tiny, "Llama4ForCausalLM", **generation.CHUNKS), train),
    "convolutions": (partial(hf.tiny, "Lfm2ForCausalLM", **CONVOLUTION), train),
    "an encoder": (partial(hf.tiny, "BartForConditionalGeneration", **hf.BART), train),
    "images": (partial(images.build, "gemma3", mm_tokens_per_image=4), with_images),
}


def left_by(ranks, model, step, count, compiled=False):
    """What is alive after these steps, while the enabled model is alive too, and was not before."""
    before, of = alive(), hf.batch()

    def run(comm):
        sp = huggingface.enable(copy.deepcopy(model), comm)
        if compiled:
            sp.compile(backend="aot_eager")
        for _ in range(count):
            step(sp, of)
        return sp

    enabled = virtual(ranks, run)
    return [x for key, x in alive().items() if key not in before and enabled]


# More than eight, because torch compiles at most eight versions of a function.
STEPS = 12
QUICK = "training", "generation", "convolutions"


@pytest.mark.parametrize(
    "way", [x if x in QUICK else pytest.param(x, marks=pytest.mark.exhaustive) for x in WAYS]
)
def test_steps_leave_no_layout_behind(way):
    make, step = WAYS[way]
    assert not left_by(2, make(), step, STEPS)


@pytest.mark.exhaustive
def test_compiled_steps_leave_no_layout_behind():
    assert not left_by(1, LLAMA(), train, STEPS, compiled=True)
