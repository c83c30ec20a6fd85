"""Choose the settings of a training script, and predict its time and memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from seqpar.core.arguments import as_choice, as_int, as_lengths, shown
from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.costs.devices import NODES, WITH_FLASH_ATTENTION_4
from seqpar.costs.flops import step_flops
from seqpar.costs.model import Model
from seqpar.layout.layout import Layout
from seqpar.recipes.memory_account import Footprint, Keeping, MemoryAccount
from seqpar.simulate.error_model import error_of
from seqpar.simulate.playback.playing import require_simpy
from seqpar.simulate.steps.training_step import Step, step

TRAINERS = ("plain", "trl")
# The fraction of a GPU's memory that a recipe can use. NCCL, CUDA and fragmentation of the
# allocator need the rest.
USABLE = 0.9
CHUNK, LOSS_CHUNK = 4096, 2048  # tokens
# From the fastest to the slowest.
KEEPINGS = (Keeping(True, 0.0), Keeping(True, 1.0), Keeping(False, 0.0), Keeping(False, 1.0))
_KEEP_OPERANDS = ("ulysses", "usp")  # strategies that keep q, k and v with the results of attention


class Published(NamedTuple):
    """A published model.

    Attributes:
        repository: the name of the model on the Hugging Face Hub.
        head_norms: whether the model normalizes queries and keys.
    """

    repository: str
    head_norms: bool


MODELS: Mapping[str, Published] = MappingProxyType(
    {
        "llama-8b": Published("meta-llama/Llama-3.1-8B", False),
        "mistral-7b": Published("mistralai/Mistral-7B-v0.1", False),
        "mixtral-8x7b": Published("mistralai/Mixtral-8x7B-v0.1", False),
        "qwen3-8b": Published("Qwen/Qwen3-8B", True),
        "qwen3-32b": Published("Qwen/Qwen3-32B", True),
        "qwen3-next-80b": Published("Qwen/Qwen3-Next-80B-A3B-Instruct", True),
    }
)


@dataclass(frozen=True, eq=False)
class Recipe:
    """The settings of a training script, with its predicted time and memory.

    Attributes:
        published: the model on the Hub.
        costs: the costs of the model on the GPUs.
        lengths: the number of tokens of each document of a step.
        strategy: the strategy of softmax attention. With "usp", a row of the mesh is a node.
        layout: "zigzag" or "contiguous".
        keeping: what is kept for backward.
        seconds: the seconds of each part of a step.
        error: the standard deviation of the relative error of the sum of `seconds`.
        memory: the memory of the GPU that needs the most memory.
    """

    published: Published
    costs: Costs
    lengths: tuple[int, ...]
    strategy: str
    layout: str
    keeping: Keeping
    seconds: dict[str, float]
    error: float
    memory: MemoryAccount

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the FLOP/s of the step, divided by the FLOP/s in the GPUs' data
        sheet.
        """
        cluster = self.costs.cluster
        flops = step_flops(self.costs.model, np.array(self.lengths))
        return flops / self.step_seconds / cluster.ranks / cluster.device.matmul_rate


def make_recipe(
    model: str,
    gpus: str,
    lengths: Sequence[int],
    *,
    memory_gb: float | None = None,
) -> Recipe:
    """Return the fastest recipe whose predicted memory fits.

    Args:
        model: a key of `MODELS`.
        gpus: the GPUs, such as "8xh100" or, with 4 nodes, "4x8-h200".
        lengths: (documents,) the number of tokens of each document of a step.
        memory_gb: the memory in GB that the script can use on a GPU. By default 90% of the GPU's
            memory.

    Raises:
        ValueError: if an argument is wrong, or if no recipe fits into memory.
        ImportError: if simpy is not installed. The extra "plan" installs it.
    """
    as_choice("model", model, tuple(MODELS))
    require_simpy()
    costs = Costs(as_gpus(gpus), Model.preset(model))
    lengths = tuple(as_lengths("lengths", lengths).tolist())
    if sum(lengths) < costs.cluster.ranks:
        least = f"at least {costs.cluster.ranks} tokens, one for each GPU"
        raise ValueError(f"lengths must have {least}, got {sum(lengths)}")
    device = costs.cluster.device
    usable = USABLE * device.memory if memory_gb is None else memory_gb * 1e9
    if not 0 < usable <= device.memory:
        most = f"above 0 and at most {device.memory / 1e9:.0f} GB, the memory of a {device.name}"
        raise ValueError(f"memory_gb must be {most}, got {memory_gb}")
    found = [
        recipe
        for strategy, layout in _strategies(costs)
        for recipe in _recipes(MODELS[model], costs, lengths, strategy, layout, usable)
    ]
    fitting = [recipe for recipe in found if recipe.memory.total <= usable]
    if fitting:
        return min(fitting, key=lambda x: x.step_seconds)
    least_bytes = min(recipe.memory.total for recipe in found)
    raise ValueError(
        f"gpus must have {least_bytes / 1e9:.1f} GB each for {model} with {sum(lengths):,} "
        f"tokens, and {usable / 1e9:.1f} GB may be used on each {device.name}: use more GPUs or "
        "fewer tokens"
    )


def as_gpus(text: str) -> Cluster:
    """Return the cluster with these GPUs. It has the rates of FlashAttention-4 if they are
    known.
    """
    expected = 'gpus must be like "8xh100", or "4x8-h100" for 4 nodes'
    match = re.fullmatch(
        r"(?:(\d+)x)?(\d+)[x-](\w+)", text.lower() if isinstance(text, str) else ""
    )
    if match is None:
        raise ValueError(f"{expected}, got {shown(text)}")
    nodes, devices = as_int("gpus", int(match[1] or 1), 1), as_int("gpus", int(match[2]), 1)
    if match[1] is None and devices > 8:
        if devices % 8:
            raise ValueError(f"{expected}: more than 8 GPUs must be a multiple of 8, got {devices}")
        nodes, devices = devices // 8, 8
    kind = WITH_FLASH_ATTENTION_4.get(match[3], match[3])
    try:
        return Cluster.preset(f"{nodes}x{devices}-{kind}")
    except ValueError:
        known = ", ".join(x for x in NODES if x not in WITH_FLASH_ATTENTION_4.values())
        raise ValueError(f"{expected}, of {known}, got {shown(text)}") from None


def _strategies(costs: Costs) -> Iterator[tuple[str, str]]:
    """Yield pairs of a strategy and a layout for one group of all GPUs."""
    cluster, kv_heads = costs.cluster, costs.model.kv_heads
    has_linear = any(layer.kind == "linear" for layer in costs.model.layers)
    # Linear layers send one state for each span, and contiguous layouts have the fewest spans.
    spread = "contiguous" if has_linear else "zigzag"
    if cluster.nodes == 1:
        if kv_heads % cluster.ranks == 0:
            yield "ulysses", "contiguous"
        yield "ring", spread
    else:
        if kv_heads % cluster.devices_per_node == 0:
            yield "usp", spread
        yield "all_gather", spread


def _recipes(
    published: Published,
    costs: Costs,
    lengths: tuple[int, ...],
    strategy: str,
    layout: str,
    usable: float,
) -> Iterator[Recipe]:
    """Yield the fastest recipe with this strategy and layout that fits into `usable` bytes of
    memory. If no recipe fits, yield the recipe that needs the least memory.
    """
    for keeping in KEEPINGS:
        recipe = predicted(published, costs, lengths, strategy, layout, keeping)
        if recipe.memory.total <= usable or keeping == KEEPINGS[-1]:
            yield recipe
            return


def predicted(
    published: Published,
    costs: Costs,
    lengths: tuple[int, ...],
    strategy: str,
    layout: str,
    keeping: Keeping,
) -> Recipe:
    cluster = costs.cluster
    edges = np.r_[0, np.cumsum(lengths)]
    made: Layout = getattr(Layout, layout)(edges, cluster.ranks)
    simulated = step(
        strategy,
        made,
        cluster,
        costs.model,
        mesh=(cluster.nodes, cluster.devices_per_node) if strategy == "usp" else None,
        checkpointing="attention" if keeping.attention else "full",
        sharding="full",
        offload=keeping.offload,
        optimizer=True,
    )
    return Recipe(
        published,
        costs,
        lengths,
        strategy,
        layout,
        keeping,
        _seconds(costs, made, simulated),
        error_of(cluster),
        _footprint(published, costs, made, strategy, simulated).account(keeping),
    )


def _footprint(
    published: Published, costs: Costs, layout: Layout, strategy: str, simulated: Step
) -> Footprint:
    model, tokens = costs.model, max(layout.tokens_per_rank)
    results = costs.activation_bytes_per_token("attention")[0]
    results -= costs.activation_bytes_per_token("full")[0]
    if strategy in _KEEP_OPERANDS:
        softmax = sum(x.kind != "linear" for x in model.layers)
        operands = model.heads * model.head_dim + model.key_value_elements
        results += softmax * operands * costs.itemsize
    peaks = {
        kind: float(outcome.peak_bytes[: layout.ranks].max())
        for (kind, _), (outcome, _) in simulated.layers.items()
    }
    largest = max(peaks, key=lambda kind: peaks[kind])
    layer = next(x for x in model.layers if x.kind == largest)
    operands_bytes = 2 * tokens * model.attention_elements(layer) * costs.itemsize
    return Footprint(
        model=model,
        head_norms=published.head_norms,
        ranks=costs.cluster.ranks,
        tokens=tokens,
        chunk=CHUNK,
        loss_chunk=LOSS_CHUNK,
        attention=min(float(operands_bytes), peaks[largest]),
        messages=max(0.0, peaks[largest] - operands_bytes),
        kept_results=float(results),
    )


def _seconds(costs: Costs, layout: Layout, simulated: Step) -> dict[str, float]:
    """Return the seconds of a step by part.

    The time in which backward computes the forward of chunked MLPs and of the chunked loss again is
    included.
    """
    model, rate = costs.model, costs.cluster.device.reached_rate
    tokens = max(layout.tokens_per_rank)
    products = sum(2 * (model.attention_weights(x) + model.ffn_weights(x)) for x in model.layers)
    again = sum(2 * model.ffn_weights(x) for x in model.layers)
    linear_modules = 4 * tokens * products / rate
    busy = float(simulated.spent("busy").max())
    # Waiting is computed from the busiest rank; the rank that waits longest is a different one.
    waiting = simulated.seconds - simulated.head - simulated.optimizer - busy
    return {
        "attention": busy - linear_modules,
        "linear modules": linear_modules + tokens * again / rate,
        "loss": simulated.head * 8 / 6,
        "waiting for messages": waiting,
        "optimizer": simulated.optimizer,
    }
