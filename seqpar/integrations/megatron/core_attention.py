"""The core attention of a Megatron layer, computed by a strategy over context-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.comm.messages.comm import Comm, as_mesh
from seqpar.core.arguments import shown
from seqpar.integrations.megatron.dealt_tokens import layout_of_packed, layout_of_rows
from seqpar.softmax.module import Attention
from seqpar.strategies.registry import attention_modules, make_attention

# For each communication type of Megatron, the strategy that sends the same tensors.
STRATEGIES = {
    None: "ring",
    "p2p": "ring",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "a2a": "ulysses",
    "a2a+p2p": "usp",
}
_CAUSAL = {"causal": True, "padding_causal": True, "no_mask": False, "padding": False}

# For each setting of the config: the values that are allowed, and the reason.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "fp8_dot_product_attention": ((False,), "attention is computed in the dtype of q"),
    "fp8_multi_head_attention": ((False,), "attention is computed in the dtype of q"),
    "batch_invariant_mode": ((False,), "pass deterministic='ranks' to sequence_parallel"),
    "cuda_graph_impl": (("none",), "a graph would keep the documents of the batch it captured"),
    "softmax_type": (("vanilla", "off-by-one", "learnable"), "Megatron has no other types"),
    "experimental_attention_variant": ((None, "gated_delta_net"), "it selects keys"),
}


@dataclass(frozen=True)
class Choice:
    strategy: str | None
    per_sequence_balancing: bool
    options: dict[str, Any] = field(default_factory=dict)


class CoreAttention(nn.Module):
    """Attention of a rank's tokens to the keys of all ranks in the context-parallel group.

    It has the constructor, the call and the parameters of Megatron's core attention.
    """

    softmax_offset: Tensor | None

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        *,
        choice: Choice,
        pg_collection: Any = None,
        **others: Any,
    ) -> None:
        super().__init__()
        self.attention_type, self.choice = attention_type, choice
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = others.get("softmax_scale")
        _check_config(config, attn_mask_type, attention_type, others.get("attention_dropout"))
        self.window_size = _window(config, layer_number, _CAUSAL[attn_mask_type.name])
        self.strategy = choice.strategy or _strategy_of(others.get("cp_comm_type"))
        self.pg_collection = pg_collection
        self.group = _group(config, pg_collection, self.strategy)
        self._attentions: dict[Any, Attention] = {}  # by group; batches may have their own
        self._attention_on(self.group)  # raises if an option is wrong
        self.shifts_labels = bool(config.mtp_num_layers)
        self.reports_logits = bool(config.qk_clip or config.log_max_attention_logit)
        self.current_max_attn_logits: Tensor | None = None  # Megatron reads and resets it
        self._make_sinks(config)

    def _make_sinks(self, config: Any) -> None:
        self.has_sinks = config.softmax_type == "learnable"
        if config.softmax_type == "vanilla":
            self.softmax_offset = None
            return
        on_cpu = config.use_cpu_initialization or not torch.cuda.is_available()
        heads = config.num_attention_heads // _size_of(self.pg_collection, "tp")
        sinks = torch.zeros(
            heads,
            dtype=config.params_dtype,
            device="cpu" if on_cpu else torch.cuda.current_device(),
        )
        if not self.has_sinks:
            self.register_buffer("softmax_offset", sinks, persistent=False)
            return
        self.softmax_offset = nn.Parameter(sinks)
        if config.perform_initialization:
            config.init_method(self.softmax_offset)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Return (s, b, h * d) from this rank's q, k and v (s, b, h, d).

        Packed sequences in the format "thd" have no b.
        """
        packed = packed_seq_params
        attn = self._attention_of(packed)
        with attn.agreeing():
            causal = self._check_call(
                attn_mask_type or self.attn_mask_type,
                packed,
                attention_mask=attention_mask,
                attention_bias=attention_bias,
            )
            thd = packed is not None and packed.qkv_format == "thd"
            operands = [_as_rows(x, thd, packed is not None) for x in (query, key, value)]
            if query.shape[0] != key.shape[0]:
                expected = f"the {query.shape[0]} tokens of query, as in training"
                raise ValueError(f"key must have {expected}, got {key.shape[0]}")
            if packed is None:
                layout = layout_of_rows(query.shape[0], attn.ranks)
            else:
                rows = (1, query.shape[0]) if thd else (query.shape[1], query.shape[0])
                by_sequence = self.choice.per_sequence_balancing
                self._check_shifts(not thd or (by_sequence and attn.ranks > 1))
                layout = layout_of_packed(packed, rows, attn.ranks, by_sequence)
        out = attn(
            *operands,
            layout,
            causal=causal,
            window_size=self.window_size,
            softmax_scale=self.softmax_scale,
            sinks=self.softmax_offset,
            return_max_logits=self.reports_logits,
        )
        if self.reports_logits:
            out, logits = out
            kept = self.current_max_attn_logits
            self.current_max_attn_logits = logits if kept is None else torch.maximum(kept, logits)
        out = out.flatten(-2)
        if thd:
            return out
        if packed is not None:
            out = out.unflatten(0, (query.shape[1], query.shape[0]))
        return out.transpose(0, 1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return Megatron's description of the learned sinks, whose heads are sharded over tp."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True) if self.has_sinks else {},
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.pg_collection.tp,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
        return found

    def _check_call(self, attn_mask_type: Any, packed: Any, **given: Tensor | None) -> bool:
        """Return whether the mask is causal, or raise a ValueError."""
        for name, x in given.items():
            if x is not None:
                way_out = "documents are packed_seq_params; leave out the attention mask with "
                way_out += "--no-create-attention-mask-in-dataloader, and biases altogether"
                raise ValueError(f"{name} must be None, got {tuple(x.shape)}: {way_out}")
        causal = _causal(attn_mask_type)
        if packed is None and attn_mask_type.name.startswith("padding"):
            named = f"attn_mask_type {attn_mask_type.name}"
            raise ValueError(f"packed_seq_params must be given with {named}, got None")
        if packed is not None and packed.qkv_format not in ("thd", "sbhd"):
            found = shown(packed.qkv_format)
            raise ValueError(f"packed_seq_params.qkv_format must be 'thd' or 'sbhd', got {found}")
        return causal

    def _check_shifts(self, by_rows: bool) -> None:
        if self.shifts_labels and by_rows:
            reason = (
                "multi-token prediction shifts labels as if Megatron had cut each "
                "document into chunks"
            )
            way_out = "pass qkv_format='thd' without per_sequence_balancing"
            raise ValueError(
                f"mtp_num_layers must be None with documents in rows: {reason}; {way_out}"
            )

    def _attention_of(self, packed: Any) -> Attention:
        own = getattr(packed, "cp_group", None)
        size: Any = getattr(packed, "local_cp_size", None)
        if own is None and size is None:
            return self._attention_on(self.group)
        if own is None and int(size) != 1:
            raise ValueError(f"packed_seq_params.cp_group must be given for {int(size)} ranks")
        if len(self.group.shape) > 1:
            raise ValueError(
                f"packed_seq_params.cp_group must be None with {self.strategy!r}, whose mesh is "
                "that of hierarchical_context_parallel_sizes"
            )
        return self._attention_on(Comm("alone", 0, 1) if own is None else Comm.of(own))

    def _attention_on(self, group: Comm) -> Attention:
        if group.name not in self._attentions:
            made = make_attention(self.strategy, group, **self.choice.options)
            self._attentions[group.name] = made
        return self._attentions[group.name]


def _as_rows(x: Tensor, thd: bool, packed: bool) -> Tensor:
    if thd:
        return x
    x = x.transpose(0, 1)
    return x.flatten(0, 1) if packed else x


def _causal(attn_mask_type: Any) -> bool:
    if (name := attn_mask_type.name) not in _CAUSAL:
        raise ValueError(f"attn_mask_type must be one of {sorted(_CAUSAL)}, got {name!r}")
    return _CAUSAL[name]


def _check_config(config: Any, attn_mask_type: Any, attention_type: str, dropout: Any) -> None:
    if attention_type != "self":
        reason = "Megatron does not distribute the keys of cross attention over ranks"
        raise ValueError(f"attention_type must be 'self', got {attention_type!r}: {reason}")
    _causal(attn_mask_type)
    dropout = config.attention_dropout if dropout is None else dropout
    if dropout:
        reason = "dropout over sharded keys is not supported"
        raise ValueError(f"attention_dropout must be 0, got {dropout}: {reason}")
    for name, (allowed, reason) in _REFUSED.items():
        if (value := getattr(config, name, allowed[0])) not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise ValueError(f"{name} must be {expected}, got {value!r}: {reason}")


def _window(config: Any, layer_number: int, causal: bool) -> tuple[int, int]:
    from megatron.core.transformer.utils import is_layer_window_attention

    window, skipped = config.window_size, config.window_attn_skip_freq
    if not is_layer_window_attention(window, skipped, layer_number):
        return -1, -1
    left, right = window
    if causal and right not in (0, -1):
        raise ValueError(f"window_size must end at the query, (left, 0), got {tuple(window)}")
    return left, right


def _strategy_of(cp_comm_type: str | None) -> str:
    if cp_comm_type not in STRATEGIES:
        known = [x for x in STRATEGIES if x]
        raise ValueError(f"cp_comm_type must be one of {known}, got {shown(cp_comm_type)}")
    return STRATEGIES[cp_comm_type]


def _group(config: Any, pg_collection: Any, strategy: str) -> Comm:
    group = getattr(pg_collection, "cp", None)
    if group is None:
        from megatron.core.parallel_state import get_context_parallel_group

        group = get_context_parallel_group()
    comm = Comm.of(group)
    if attention_modules()[strategy].dimensions == 1:
        return comm
    sizes = config.hierarchical_context_parallel_sizes or ([1, 1] if comm.size == 1 else None)
    if sizes is None or len(sizes) != 2 or sizes[0] * sizes[1] != comm.size:
        expected = f"two sizes whose product is {comm.size} for {strategy!r}"
        raise ValueError(f"hierarchical_context_parallel_sizes must be {expected}, got {sizes}")
    inner, outer = sizes
    return as_mesh(comm, outer, inner)


def _size_of(pg_collection: Any, name: str) -> int:
    group = getattr(pg_collection, name, None)
    return 1 if group is None else int(group.size())
