"""Errors for unknown arguments of a call or a module. They name the argument to use instead.

Users of F.scaled_dot_product_attention, flash-attn, transformers and fla know many of our arguments
by different names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from seqpar.core.arguments import shown

# For each name in another library, our names of the argument. Each call has at most one of these
# names.
_OURS = {
    **dict.fromkeys(("is_causal", "causal_mask"), ("causal",)),
    **dict.fromkeys(("scale", "softmax_scale", "scaling"), ("softmax_scale", "scale")),
    **dict.fromkeys(("sm_scale", "attn_scale"), ("softmax_scale", "scale")),
    **dict.fromkeys(("dropout", "attention_dropout"), ("dropout_p",)),
    **dict.fromkeys(("s_aux", "learnable_sink", "sink"), ("sinks",)),
    **dict.fromkeys(("return_softmax_lse", "return_attn_probs"), ("return_lse",)),
    **dict.fromkeys(("logits_soft_cap", "attn_logit_softcapping"), ("softcap",)),
    **dict.fromkeys(("g", "gk", "decay"), ("log_decay",)),
    **{name: (name[0],) for name in ("query", "key", "value")},
    **{name: (name[0],) for name in ("query_states", "key_states", "value_states")},
    "output_final_state": ("return_state",),
    "sliding_window": ("window_size",),
}
_HOW = {
    "sliding_window": ": a sliding window of w keys, with the query's own, is (w - 1, 0)",
    "decay": ", its logarithm",
}
_DOCUMENTS = "leave it out: the layout has the documents, as in Layout.zigzag(cu_seqlens, ranks)"
_POSITIONS = "leave it out: the layout has the positions, layout.position_ids(rank)"
_CACHE = "decode with seqpar.ShardedCache"
_MASK = "documents and padding need no mask, since the layout has the documents"
_ADVICE = {
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv"), _DOCUMENTS),
    **dict.fromkeys(("max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_seqlen_kv"), _DOCUMENTS),
    **dict.fromkeys(("max_length_q", "max_length_k", "cu_seq_lens_q", "cu_seq_lens_k"), _DOCUMENTS),
    **dict.fromkeys(("position_ids", "cache_position"), _POSITIONS),
    **dict.fromkeys(("past_key_value", "past_key_values", "use_cache", "block_table"), _CACHE),
    **dict.fromkeys(("k_cache", "v_cache", "cache_seqlens", "kv_cache"), _CACHE),
    "enable_gqa": "leave it out: k and v may always have fewer heads than q",
    "group": "leave it out: the module was made with its group",
}
_MASKS = "attn_mask", "attention_mask", "block_mask", "key_padding_mask", "attn_bias"


def call_arguments(forward: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(forward).parameters.values()
    return [x.name for x in parameters if x.kind is not inspect.Parameter.VAR_KEYWORD]


def advice(name: str, known: list[str]) -> str:
    """Return a text that says what to use instead of the unknown argument `name`, or "".

    `known` are the arguments of the call.
    """
    for ours in _OURS.get(name, ()):
        if ours in known and ours != name:
            return f"pass {ours}{_HOW.get(name, '')}"
    if name in _MASKS:
        other = "for another mask, pass mask=seqpar.Mask.of_ranges(...)"
        return f"{_MASK}; {other}" if "mask" in known else _MASK
    return _ADVICE.get(name, "")


def unknown_argument(others: Mapping[str, object], known: list[str]) -> TypeError:
    """Return the error for the first argument in `others`, given the names of all arguments."""
    name, value = next(iter(others.items()))
    instead = advice(name, known)
    given = f"{name} is not an argument of a call, got {name}={shown(value)}"
    return TypeError(
        f"{given}{f': {instead}' * bool(instead)}; the arguments are {', '.join(known)}"
    )


def unknown_option(name: str, strategy: str, options: list[str], call: list[str]) -> TypeError:
    text = f"{name} is not an option of {strategy!r}, which has {', '.join(options)}"
    if name in call:
        return TypeError(f"{text}; {name} is an argument of a call")
    instead = advice(name, call)
    return TypeError(f"{text}{f'; in a call, {instead}' * bool(instead)}")
