"""Attention over ranks in verl's FSDP engines, instead of verl's patches for Ulysses.

The environment variable `VERL_ENGINE_DEVICE=seqpar` selects these engines, and the variable
`SEQPAR_VERL` names the strategy and its options. This module imports verl, and is tested with verl
0.9.1.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from verl.utils import seqlen_balancing
from verl.utils import tensordict_utils as verl_data
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import (
    FSDPEngineWithLMHead,
    FSDPEngineWithValueHead,
)

from seqpar.balance.planning.planner import plan
from seqpar.core.arguments import as_int, shown
from seqpar.costs.cluster import Cluster
from seqpar.integrations.packed_model import PackedModel, PackedPart

__all__ = ["LanguageModelEngine", "ValueModelEngine", "balanced_partitions"]

VARIABLE = "SEQPAR_VERL"
# verl replaces the forward functions of these models' layers.
_REPLACED = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v",
    "kimi_vl",
)  # fmt: skip
# Arguments of the model in verl's batches of text; the layout describes the documents.
_OF_TEXT = {"input_ids", "position_ids", "attention_mask", "cu_seqlens", "cu_seqlens_cpu"}
# verl's workload of a sequence is s² + 24576·s.
_LINEAR = 24576
_verls_partitions = seqlen_balancing.get_seqlen_balanced_partitions


class Settings(NamedTuple):
    """The settings in the variable `SEQPAR_VERL`.

    Attributes:
        strategy, layout, options: as in `seqpar.integrations.huggingface.enable`.
        balance: the arguments `cluster` and `model` of `balance.plan`, which then divides sequences
            into micro-batches. If `balance` is None, verl divides the sequences.
    """

    strategy: str
    layout: str
    options: dict[str, Any]
    balance: dict[str, str] | None

    @classmethod
    def read(cls) -> Settings:
        text = os.environ.get(VARIABLE, "{}")
        try:
            given = json.loads(text)
        except ValueError:
            given = None
        if not isinstance(given, dict):
            example = '{"strategy": "ring"}'
            raise ValueError(f"{VARIABLE} must be a JSON object such as {example}, got {text!r}")
        balance = given.pop("balance", None)
        if balance is not None and (
            not isinstance(balance, dict) or balance.keys() != {"cluster", "model"}
        ):
            expected = '{"cluster": "1x8-h100", "model": "llama-8b"}'
            raise ValueError(f"balance must be like {expected}, got {shown(balance)}")
        strategy, layout = given.pop("strategy", "ring"), given.pop("layout", "zigzag")
        return cls(strategy, layout, given, balance)


class _OverRanks:
    """The methods that seqpar's engines override in verl's engines.

    The engines divide sequences over ranks by a layout. After the model has run, the engines gather
    the log-probabilities, entropies and values of all ranks, as verl does. verl computes its losses
    from the gathered numbers.
    """

    ulysses_sequence_parallel_size: int
    ulysses_parallel_group: Any
    use_ulysses_sp: bool

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        self._settings = Settings.read()
        if engine_config.ulysses_sequence_parallel_size > 1:
            _check_configs(model_config, engine_config)
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)  # type: ignore[call-arg]

    def _build_module(self) -> Any:
        ranks = self.ulysses_sequence_parallel_size
        self.ulysses_sequence_parallel_size = 1  # for verl's patches, which are not applied then
        try:
            return super()._build_module()  # type: ignore[misc]
        finally:
            self.ulysses_sequence_parallel_size = ranks

    def _build_fsdp_module(self, module: nn.Module) -> Any:
        if self.use_ulysses_sp and hasattr(module, "v_head"):
            raise ValueError(
                "model must be a token classifier of transformers, got a v_head of TRL"
            )
        wrapped = super()._build_fsdp_module(module)  # type: ignore[misc]
        if self.use_ulysses_sp:
            strategy, layout, options, balance = self._settings
            group = self.ulysses_parallel_group
            self._packed = PackedModel(wrapped, group, strategy, layout, options)
            if balance is not None:
                serve_partitions(group.size(), **balance)
        return wrapped

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        if not self.use_ulysses_sp:
            return super().prepare_model_inputs(micro_batch)  # type: ignore[misc]
        if verl_data.get_non_tensor_data(micro_batch, key="distillation_use_topk", default=False):
            reason = "verl cuts the teacher's logits by Ulysses' rule"
            raise ValueError(f"distillation_use_topk must be False: {reason}")
        with self._whole_sequences():
            inputs, outputs = super().prepare_model_inputs(micro_batch)  # type: ignore[misc]
        if beside := sorted(inputs.keys() - _OF_TEXT):
            reason = "only text is divided among ranks"
            raise ValueError(f"multi_modal_inputs must be empty, got {beside}: {reason}")
        cu_seqlens = micro_batch["input_ids"].offsets().cpu().numpy().astype(np.int64)
        if outputs["pad_size"]:  # of verl's `pad_to_length`
            cu_seqlens = np.r_[cu_seqlens, cu_seqlens[-1] + outputs["pad_size"]]
        tokens = {name: inputs[name] for name in ("input_ids", "position_ids")}
        self._part: PackedPart = self._packed.shard(tokens, cu_seqlens)
        for name, value in (("input_ids_rmpad_rolled", 0), ("temperature_rmpad", 1)):
            outputs[name] = self._part.cut(outputs[name], value, dim=0)
        return self._part.inputs, outputs

    def _gather_and_unpad_packed(self, tensor: Tensor, pad_size: int) -> Any:
        if not self.use_ulysses_sp:
            return super()._gather_and_unpad_packed(tensor, pad_size)  # type: ignore[misc]
        # Each rank computes the loss of all tokens. Backward sums these equal gradients, and FSDP
        # divides by the number of ranks.
        whole = self._part.join(tensor, self.ulysses_parallel_group, dim=0)
        return whole.narrow(0, 0, len(whole) - pad_size)

    @contextmanager
    def _whole_sequences(self) -> Iterator[None]:
        """Within this context, verl's code prepares whole sequences, as on one rank."""
        self.use_ulysses_sp = False
        try:
            yield
        finally:
            self.use_ulysses_sp = True


@EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device="seqpar")
class LanguageModelEngine(_OverRanks, FSDPEngineWithLMHead):
    """verl's engine for actors, reference models and fine-tuning, with attention over ranks."""


@EngineRegistry.register("value_model", ["fsdp", "fsdp2"], device="seqpar")
class ValueModelEngine(_OverRanks, FSDPEngineWithValueHead):
    """verl's engine for critics, with attention over ranks."""


def balanced_partitions(
    lengths: list[int], partitions: int, *, cluster: Cluster | str, model: str
) -> list[list[int]]:
    """Divide sequences by `balance.plan` into micro-batches that take about the same time.

    Args:
        lengths: the number of tokens of each sequence, at least 1.
        partitions: the number of micro-batches, at most the number of sequences.
        cluster, model: as in `balance.plan`. The cluster's devices share each sequence.

    Returns:
        for each micro-batch, the sorted indices of its sequences; none is empty.
    """
    partitions = as_int("partitions", partitions, 1)
    if partitions > len(lengths):
        limit = f"{len(lengths)}, the number of sequences"
        raise ValueError(f"partitions must be at most {limit}, got {partitions}")
    made = plan(lengths, cluster, model, capacity=sum(lengths), micro_batches=partitions)
    return [sorted(batch.documents.tolist()) for batch in made.micro_batches]


def serve_partitions(ranks: int, cluster: str, model: str) -> None:
    """Make verl's `rearrange_micro_batches` call `balanced_partitions`."""
    devices = Cluster.preset(cluster)
    if devices.ranks != ranks:
        expected = f"the {ranks} ranks of ulysses_sequence_parallel_size"
        raise ValueError(f"cluster must have {expected}, got {devices.ranks}")

    def partitions(seqlen_list: list[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
        if equal_size:  # a plan does not limit how many sequences a micro-batch has
            return _verls_partitions(seqlen_list, k_partitions, equal_size)
        lengths = [length_of_workload(x) for x in seqlen_list]
        return balanced_partitions(lengths, k_partitions, cluster=devices, model=model)

    seqlen_balancing.get_seqlen_balanced_partitions = partitions


def length_of_workload(workload: int) -> int:
    """Return the number of tokens s of a sequence, given the workload s² + 24576·s by which verl
    balances sequences.
    """
    root = math.isqrt(_LINEAR**2 + 4 * workload)
    return max((root - _LINEAR) // 2, 1)


def _check_configs(model_config: Any, engine_config: Any) -> None:
    config = model_config.hf_config
    kind = getattr(config, "model_type", None)
    if kind in _REPLACED or hasattr(config, "vision_config"):
        reason = "verl replaces the code of such models"
        raise ValueError(f"model must be of text alone, got model_type {kind!r}: {reason}")
    if model_config.use_fused_kernels or engine_config.use_fused_kernels:
        raise ValueError("use_fused_kernels must be False, since they replace the model's forward")
    if model_config.mtp.enable:
        raise ValueError("mtp.enable must be False: its tokens are shifted on each rank")
    if (mode := engine_config.router_replay.mode) != "disabled":
        reason = "routers would replay the tokens of a different rank"
        raise ValueError(f"router_replay.mode must be 'disabled', got {mode!r}: {reason}")
