"""The parts of Megatron-Core 0.19.2 that seqpar meets, for tests without the package.

Classes and functions have Megatron-Core's names, fields and arguments; a test compares them with
the package.
"""

import dataclasses
import enum
import sys
import types
from typing import Any


class AttnMaskType(enum.Enum):
    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
    causal_bottom_right = 6


@dataclasses.dataclass
class ModuleSpec:
    module: Any
    params: dict = dataclasses.field(default_factory=dict)
    submodules: Any = None
    metainfo: dict = dataclasses.field(default_factory=dict)

    def __call__(self, *args, **kwargs):
        return self.module(*args, **self.params, **kwargs)


@dataclasses.dataclass
class SelfAttentionSubmodules:
    linear_qkv: Any
    core_attention: Any
    linear_proj: Any
    q_layernorm: Any = None
    k_layernorm: Any = None


@dataclasses.dataclass
class CrossAttentionSubmodules:
    linear_q: Any
    linear_kv: Any
    core_attention: Any
    linear_proj: Any


@dataclasses.dataclass
class PackedSeqParams:
    qkv_format: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    cu_seqlens_q_padded: Any = None
    cu_seqlens_kv_padded: Any = None
    max_seqlen_q: Any = None
    max_seqlen_kv: Any = None
    local_cp_size: Any = None
    cp_group: Any = None
    total_tokens: Any = None
    seq_idx: Any = None
    tokens_per_sample: Any = None
    pad_between_seqs: Any = None


class DotProductAttention:
    """The core attention that is replaced. It is never built."""

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
        pg_collection=None,
    ):
        raise NotImplementedError

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ):
        raise NotImplementedError


class BalancedCPScheduler:
    """The scheduler that `PlanScheduler` replaces. It is never made."""

    def __init__(self, max_seq_len_per_rank, dp_cp_group):
        raise NotImplementedError

    def get_groups_and_subsamples(self, sample_id_seqlens, config):
        raise NotImplementedError


def is_layer_window_attention(window_size, window_attn_skip_freq, layer_number):
    if not window_size or window_attn_skip_freq is None:
        return bool(window_size)
    if isinstance(window_attn_skip_freq, int):
        return layer_number % window_attn_skip_freq != 0
    return bool(window_attn_skip_freq[layer_number - 1])


def make_sharded_tensors_for_checkpoint(
    state_dict,
    prefix,
    tensor_parallel_layers_axis_map=None,
    sharded_offsets=(),
    extra_state_suffix="_extra_state",
    tp_group=None,
    dp_cp_group=None,
):
    return {
        prefix + name: (x, tensor_parallel_layers_axis_map[name]) for name, x in state_dict.items()
    }


def get_context_parallel_group(check_initialized=True):
    raise AssertionError("the tests pass their groups")


# The fields of TransformerConfig that seqpar reads, with their defaults.
CONFIG = {
    "num_attention_heads": 4,
    "attention_dropout": 0.1,
    "apply_query_key_layer_scaling": False,
    "batch_invariant_mode": False,
    "cuda_graph_impl": "none",
    "experimental_attention_variant": None,
    "fp8_dot_product_attention": False,
    "fp8_multi_head_attention": False,
    "hierarchical_context_parallel_sizes": None,
    "init_method": None,
    "log_max_attention_logit": False,
    "mtp_num_layers": None,
    "params_dtype": None,
    "perform_initialization": True,
    "qk_clip": False,
    "softmax_type": "vanilla",
    "use_cpu_initialization": False,
    "window_attn_skip_freq": None,
    "window_size": None,
}

# Where Megatron-Core has them.
PLACES = {
    "transformer.enums": [AttnMaskType],
    "transformer.spec_utils": [ModuleSpec],
    "transformer.attention": [SelfAttentionSubmodules, CrossAttentionSubmodules],
    "transformer.dot_product_attention": [DotProductAttention],
    "transformer.utils": [is_layer_window_attention, make_sharded_tensors_for_checkpoint],
    "packed_seq_params": [PackedSeqParams],
    "parallel_state": [get_context_parallel_group],
    "pipeline_parallel.hybrid_cp_schedule": [BalancedCPScheduler],
}


def modules():
    """Modules with the names of Megatron-Core's, for `sys.modules`."""
    made = {}
    for place, things in PLACES.items():
        parts = ["megatron", "core", *place.split(".")]
        for n in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:n]), types.ModuleType(".".join(parts[:n])))
        for thing in things:
            setattr(made[".".join(parts)], thing.__name__, thing)
    return made


def install(monkeypatch):
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
