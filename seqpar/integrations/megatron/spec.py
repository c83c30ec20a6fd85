"""Replace the core attention in Megatron's specs of layers."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from seqpar.core.arguments import as_bool, as_choice, shown
from seqpar.integrations.megatron.core_attention import Choice, CoreAttention
from seqpar.strategies.registry import attention_modules

_REPLACED = "DotProductAttention", "TEDotProductAttention", CoreAttention.__name__


def sequence_parallel(
    spec: Any,
    strategy: str | None = None,
    *,
    per_sequence_balancing: bool = False,
    **options: Any,
) -> Any:
    """Return a copy of a Megatron spec whose core attention runs over context-parallel ranks.

    Build the model from the copy. The names of parameters and the format of checkpoints do not
    change, and gradients are equal to those of Megatron's own context parallelism. Each layer runs
    the strategy on Megatron's context-parallel group. If a batch has a `cp_group` in its
    PackedSeqParams, the layer runs the strategy on that group.

    Args:
        spec: a ModuleSpec of a layer, a block or a model, the submodules of one of them, or a list
            of these, such as the results of `get_gpt_layer_local_spec()`.
        strategy: as in `seqpar.make_attention`. "usp" and "mesh" need a config with two
            `hierarchical_context_parallel_sizes`, (inner, outer): the inner ranks form the rows of
            the mesh. None stands for the strategy that matches the config's `cp_comm_type`: "ring"
            for "p2p", "all_gather" for "all_gather", "ulysses" for "a2a", and "usp" for "a2a+p2p".
        per_sequence_balancing: True if Megatron cuts the whole pack of the format "thd" into
            chunks, as with `--dataloader-inter-document-masking`. False if Megatron cuts each
            document into chunks. With False, the length of each document, including its padding,
            must be a multiple of twice the number of context-parallel ranks.
        options: the strategy's options.

    Raises:
        ValueError: if the spec has no core attention, a core attention that is not
            DotProductAttention or TEDotProductAttention, or cross attention. Building the model
            raises a ValueError that names the field of a config that cannot be computed exactly.
        TypeError: when the model is built, if the strategy does not have one of the options.
    """
    try:
        from megatron.core.transformer.spec_utils import ModuleSpec
    except ImportError as error:
        reason = "seqpar.integrations.megatron needs megatron-core"
        raise ImportError(f"{reason}: pip install 'seqpar[megatron]'") from error
    if strategy is not None:
        as_choice("strategy", strategy, tuple(sorted(attention_modules())))
    as_bool("per_sequence_balancing", per_sequence_balancing)
    choice = Choice(strategy, per_sequence_balancing, options)
    replacing = _Replacing(ModuleSpec(module=CoreAttention, params={"choice": choice}))
    made = replacing.in_node(spec)
    if not replacing.count:
        raise ValueError(f"spec must have a core attention, got {shown(spec)}")
    return made


class _Replacing:
    def __init__(self, core: Any) -> None:
        self.core, self.count = core, 0

    def in_node(self, node: Any) -> Any:
        if isinstance(node, list | tuple) and not hasattr(node, "_fields"):
            return type(node)(map(self.in_node, node))
        if isinstance(node, functools.partial):
            keywords = {name: self.in_node(x) for name, x in node.keywords.items()}
            return functools.partial(node.func, *node.args, **keywords)
        if not dataclasses.is_dataclass(node) or isinstance(node, type):
            return node
        if type(node).__name__ == "CrossAttentionSubmodules":
            raise ValueError("spec must have self attention only, got CrossAttentionSubmodules")
        values = {f.name: getattr(node, f.name) for f in dataclasses.fields(node) if f.init}
        return dataclasses.replace(
            node,
            **{
                name: self._core(x) if name == "core_attention" else self.in_node(x)
                for name, x in values.items()
            },
        )

    def _core(self, node: Any) -> Any:
        if node is None:
            return None
        kind = getattr(node, "module", getattr(node, "func", node))
        name = kind[-1] if isinstance(kind, tuple) else getattr(kind, "__name__", shown(kind))
        if name not in _REPLACED:
            raise ValueError(f"core_attention must be one of {list(_REPLACED[:2])}, got {name}")
        self.count += 1
        return self.core
