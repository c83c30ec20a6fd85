"""Find the attention layers of a model, its tables of positions, and its kind of loss.

`find_layers` also refuses modules that need the whole sequence, since a rank has only some tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from seqpar.core.torch_private import calling_modules
from seqpar.integrations.huggingface.model.code import (
    ATTENTION,
    calls_loss_function,
    dispatches,
    global_of,
    read_elsewhere,
    takes,
)

POSITIONS = re.compile(r"(?:^|\.)(?:wpe|(?!\w*(?:relative|bias))\w*position\w*)$")
TYPES = re.compile(r"(?:token_type|segment)\w*$")
_NUMBERING = "create_position_ids_from_input_ids"
_MIXER = re.compile(  # names of classes that mix tokens
    r"(?!.*Norm(?:Gated)?$).*(?:Mamba|Rwkv|Recurrent|Retention|DeltaNet|GatedDelta|ShortConv"
    r"|LinearAttention|Lightning|Hyena|SSM|Conv1d|LongConv|TokenShift)"
)
_CROSS = re.compile(r"encoder_attn|cross_?attn|cross_?attention|EncDecAttention", re.IGNORECASE)
# Attributes of a layer that transformers' eager functions may read.
_READ = {"num_key_value_groups", "training", "is_causal", "config", "layer_idx", "head_dim"}
_MIXING_SETTINGS = {
    "trigram_input": "embeddings mix neighbouring tokens",
    "expert_capacity": "experts take the first tokens that choose them",
    "token_dropout": "embeddings depend on how many tokens a sequence has",
}
# Families that cannot be computed exactly and that only the name of the family identifies.
_MODEL_TYPES = {
    "t5gemma": "without a mask, the model hides all tokens that are equal to the padding token; "
    "choose another family",
}
_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
# Settings of DINOv3. Unless they are None, training moves the positions of patches at random.
_RANDOM = ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_LOSSES = {
    "ForCausalLM": True,
    "ForConditionalGeneration": True,
    "ForMaskedLM": False,
    "ForTokenClassification": False,
}
# Class -> kind of `RecurrentAttention`, or "convolution" if only a convolution mixes tokens.
_RECURRENT = {
    "BambaMixer": "scalar_decay",
    "FalconH1Mixer": "scalar_decay",
    "GraniteMoeHybridMambaLayer": "scalar_decay",
    "KimiLinearDeltaAttention": "kda",
    "Lfm2MoeShortConv": "convolution",
    "Lfm2ShortConv": "convolution",
    "Lfm3ShortConv": "convolution",
    "Mamba2Mixer": "scalar_decay",
    "MiniMaxLightningAttention": "constant_decay",
    "NemotronHMamba2Mixer": "scalar_decay",
    "OlmoHybridGatedDeltaNet": "gated_delta",
    "Qwen3NextGatedDeltaNet": "gated_delta",
    "Qwen3_5GatedDeltaNet": "gated_delta",
    "Qwen3_5MoeGatedDeltaNet": "gated_delta",
    "Zamba2MambaMixer": "scalar_decay",
}
# Kind -> the global functions by which forwards of this kind mix tokens.
CALLED: dict[str, tuple[str, ...]] = {
    "constant_decay": (),
    "convolution": ("causal_conv1d_fn",),
    "gated_delta": ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"),
    "kda": ("causal_conv1d_fn", "chunk_kimi_delta_attention"),
    "scalar_decay": (
        "causal_conv1d_fn", "mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined",
    ),
}  # fmt: skip
# Entries of a config's `layer_types` that are allowed in a model with recurrent layers.
_RECURRENT_TYPES = {"conv", "hybrid", "linear_attention", "mamba", "mlp", "moe"}


class Uncopied:
    """Attributes that a copy of an enabled model shares with the model. Calls of the copy are
    refused.
    """

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        how = "call sp.disable() first, or save its state_dict() or use save_pretrained()"
        raise ValueError(f"model cannot be pickled while seqpar runs it over ranks: {how}")


@dataclass(eq=False)
class AttentionLayer(Uncopied):
    name: str
    cross: bool  # whether a decoder's queries attend to the encoder's keys
    in_encoder: bool
    calls: int = 0  # how often the layer's forward ran
    forward_bytes: int = 0  # bytes that this rank sent for the layer in forward
    steps: int = 0  # number of calls after a prefill
    step_bytes: int = 0  # forward bytes of these calls
    backward_bytes: int = 0  # bytes that this rank sent for the layer in backward
    kept_bytes: int = 0  # bytes of the out and lse of the last call, which checkpoints keep
    linear: Callable[..., Tensor] | None = None  # set by `make_linear`
    recurrence: Any = None  # the `PatchedRecurrence` of a recurrent layer
    handle: Any = None  # a tensor by which compiled graphs find this object
    session: Any = None  # the layer's `EnabledModel`
    comm: Any = None  # the Comm through which the layer sends


def kind_of(layer: type) -> str | None:
    """Return the kind of recurrence that a layer computes, or None for all other layers.

    Classes are compared by their forward, because FSDP replaces a layer's class by a subclass with
    the same forward.
    """
    for base in layer.__mro__:
        ours = base.__module__.startswith("transformers.models.") and base.__name__ in _RECURRENT
        if ours and getattr(layer, "forward", None) is base.forward:  # type: ignore[attr-defined]
            return _RECURRENT[base.__name__]
    return None


def find_layers(
    model: nn.Module, prefix: str, faults: list[str]
) -> dict[nn.Module, AttentionLayer]:
    """Return the attention layers of a model, as a dict from the module of a layer to its
    `AttentionLayer`.

    Raises a ValueError if a layer cannot be computed or `faults` is not empty. The error names all
    such layers and all `faults`.
    """
    modules = dict(model.named_modules(prefix=prefix))
    kinds: dict[str, type] = {name: type(x) for name, x in modules.items()}
    softmax = {name for name, x in kinds.items() if dispatches(x)}
    recurrent = {name for name, x in kinds.items() if kind_of(x)}
    reached = {name: x for name, x in modules.items() if name in softmax or name in recurrent}
    refused = [*_deaf(modules, reached), *_mixing(model, modules, reached, recurrent)]
    if not reached and not refused:
        refused = [f"{type(model).__name__} has no attention layers"]
    attending = {name: x for name, x in reached.items() if name in softmax}
    refused += [*_by_setting(model, attending), *faults]
    if refused:
        reasons = "; ".join(refused)
        raise ValueError(f"model cannot be computed on parts of its sequences: {reasons}")
    encoder = encoder_of(model)
    inside = set() if encoder is None else set(encoder.modules())
    return {
        x: AttentionLayer(name, bool(_CROSS.search(name)) and encoder is not None, x in inside)
        for name, x in reached.items()
    }


def loss_shifts(model: Any) -> bool | None:
    """Return whether the model's loss shifts labels: whether it compares the logits of a token with
    the label of the following token.

    Returns None if the model's loss is not known, or if the model has one label per row. Raises a
    ValueError for other kinds of labels, such as the position of an answer.
    """
    if encoder_of(model) is not None:
        return False
    if answers_for_rows(model):
        return None
    name, kind = type(model).__name__, getattr(model, "loss_type", None)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if kind is None and (head is not None or name.endswith(("LMHeadModel", "LMHead"))):
        kind = "ForCausalLM"
    if kind is None and re.search(r"For[A-Z]\w+$|DoubleHeads", name):
        kind = name
    if kind is not None and kind not in _LOSSES:
        reason = "it answers for whole sequences, and no rank has all tokens of a sequence"
        raise ValueError(f"model must have a head for each token, got {name}: {reason}")
    # BartForCausalLM, for example, computes its loss itself, and does not shift the labels.
    if kind is None or (kind == "ForCausalLM" and not calls_loss_function(type(model))):
        return None
    return _LOSSES[kind]


def answers_for_rows(model: Any) -> bool:
    """Return whether a model's head is transformers' head that computes one result per row."""
    from transformers.modeling_layers import GenericForSequenceClassification as Generic

    return isinstance(model, Generic) and type(model).forward is Generic.forward


def encoder_of(model: Any) -> nn.Module | None:
    config = getattr(model, "config", None)
    if not getattr(config, "is_encoder_decoder", False) or not hasattr(model, "get_encoder"):
        return None
    # The model is only an encoder, but its config describes a decoder too.
    if not takes(model, "decoder_input_ids"):
        return None
    encoder: nn.Module = model.get_encoder()
    return encoder if encoder is not model else None


def default_positions(model: nn.Module, batch: dict[str, Any], rows: int, columns: int) -> Tensor:
    """Return the positions (B, S) that the model itself would give to the tokens of a whole
    batch.
    """
    modules: list[Any] = list(model.modules())
    for x in modules:
        if (make := _numbering(x)) is not None:
            if "input_ids" not in batch:
                raise ValueError("position_ids must be given for a batch without input_ids")
            return make(batch["input_ids"], x.padding_idx)
    device = (batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"]).device
    of_columns = torch.arange(columns, device=device).expand(rows, columns)
    mask = batch.get("attention_mask")
    if mask is not None and any(is_table(x) and takes(x, "attention_mask") for x in modules):
        of_tokens = mask.long().cumsum(1) - 1
        if ((of_tokens != of_columns) & mask.bool()).any():
            reason = f"{type(model).__name__} may count tokens or columns by itself"
            raise ValueError(f"position_ids must be given for rows padded on the left: {reason}")
    return of_columns


def _numbering(x: Any) -> Callable[..., Tensor] | None:
    """Return the model's function that computes positions from the padding of a batch, as RoBERTa
    has one, or None.
    """
    if not is_formula(x) and not isinstance(getattr(x, "position_embeddings", None), nn.Embedding):
        return None
    return getattr(x, _NUMBERING, None) or global_of(x, _NUMBERING)


def tables_of(model: nn.Module, kind: re.Pattern[str]) -> list[nn.Embedding]:
    """Return the embedding tables whose names match `kind`, which is `POSITIONS` or `TYPES`."""
    named = model.named_modules()
    return [x for name, x in named if isinstance(x, nn.Embedding) and kind.search(name)]


def classes_of(model: Any) -> int | None:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None and "ForTokenClassification" in type(model).__name__:
        return int(model.config.num_labels)
    classes = getattr(head, "out_features", None)
    return None if classes is None else int(classes)


def is_table(x: nn.Module) -> bool:
    """Return whether a module is an embedding table that computes the positions of tokens
    itself.
    """
    return isinstance(x, nn.Embedding) and takes(x, "position_ids")


def is_formula(x: nn.Module) -> bool:
    """Return whether a module computes position embeddings by a formula, as M2M100 does."""
    return hasattr(x, _NUMBERING) and isinstance(getattr(x, "weights", None), Tensor)


def _deaf(modules: dict[str, nn.Module], reached: dict[str, nn.Module]) -> list[str]:
    """Return a text for each layer that does not call a function of transformers for its attention,
    so that its attention cannot be replaced.
    """
    deaf = {}
    for name, x in modules.items():
        if ATTENTION.search(type(x).__name__) and not isinstance(x, nn.ModuleList):
            mixes = _MIXER.search(type(x).__name__)
            if not mixes and not _related(name, reached) and _has_parameters(x):
                deaf[name] = type(x).__name__
    if not deaf:
        return []
    outermost = _outermost(deaf)
    kinds = ", ".join(sorted(set(outermost.values())))
    count = f"{len(reached)} of {len(reached) + len(outermost)} attention layers can be reached"
    how = "choose a family whose layers call the attention function that its config names"
    return [f"{count}: {_listed(outermost)} compute attention themselves ({kinds}); {how}"]


def _mixing(
    model: nn.Module,
    modules: dict[str, nn.Module],
    reached: Collection[str],
    recurrent: Collection[str],
) -> list[str]:
    """Return a text for each module that mixes tokens in a different way than by attention."""
    mixers = {}
    for name, x in modules.items():
        kind = type(x).__name__
        # Class names of models contain the names of their layers.
        whole = hasattr(x, "base_model_prefix")
        by_token = getattr(x, "kernel_size", None) == (1,)  # such a convolution mixes channels only
        apart = whole or by_token or name in reached or _related(name, recurrent)
        if _MIXER.search(kind) and not apart:
            mixers[name] = kind
    outermost = _outermost(mixers)
    how = "mixes tokens along the sequence, which it would do on each rank alone"
    reasons = [f"{name} ({kind}) {how}" for name, kind in outermost.items()]
    known = _LAYER_TYPES | (_RECURRENT_TYPES if recurrent else set())
    for config in configs_of(model):
        others = sorted(set(getattr(config, "layer_types", None) or ()) - known)
        if others and not outermost:
            unknown = ", ".join(map(str, others))
            reasons.append(f"layer_types of its config has {unknown}, which seqpar does not know")
    for name, x in modules.items():
        if isinstance(x, nn.ModuleList) and not outermost and not re.search(r"\.\d+\.", name):
            blocks = [f"{name}.{i}" for i in range(len(x))]
            without = [key for key in blocks if not any(_is_inside(y, key) for y in reached)]
            if 0 < len(without) < len(blocks) and len(set(map(type, x))) > 1:
                reasons.append(f"{_listed(without)} have no attention that can be reached")
    for name, x in modules.items():
        if re.search(r"pooler$", name) and _has_parameters(x):
            reason = "takes one token of each sequence, which one rank holds"
            reasons.append(f"{name} {reason}: make the model with add_pooling_layer=False")
    return reasons


def _by_setting(model: nn.Module, reached: dict[str, nn.Module]) -> list[str]:
    reasons = []
    for name, x in reached.items():
        if strange := ", ".join(sorted(read_elsewhere(type(x)) - _READ)):
            reasons.append(f"{name}: its attention reads {strange}, whose meaning is unknown")
        if hasattr(x, "has_relative_attention_bias"):
            how = "choose a family without relative biases"
            reasons.append(
                f"{name} adds a bias to its scores, which seqpar does not support: {how}"
            )
    reasons += layerdrop_faults(model)
    for config in configs_of(model):
        kind = getattr(config, "model_type", None)
        if kind in _MODEL_TYPES:
            reasons.append(f"its model_type is {kind}: {_MODEL_TYPES[kind]}")
        for name, meaning in _MIXING_SETTINGS.items():
            if getattr(config, name, False):
                reasons.append(f"{name} is set: {meaning}, and a rank has only some")
    return reasons


def layerdrop_faults(model: nn.Module) -> list[str]:
    """Return a text for each module that, in training, would skip different layers on different
    ranks.
    """
    reasons = []
    for name, x in model.named_modules():
        p = getattr(x, "layerdrop", 0) if x.training else 0
        if isinstance(p, float) and p > 0:
            reasons.append(
                f"{name} has layerdrop {p}, which would skip different layers on each rank"
            )
    return reasons


def most_dropped(module: nn.Module) -> float:
    """Return the largest of a module's dropout probabilities, which are found by the names of its
    settings.
    """
    if isinstance(module, _DROPOUTS):
        return module.p
    numbers = ((name, x) for name, x in vars(module).items() if isinstance(x, float))
    return max([x for name, x in numbers if "drop" in name or "jitter" in name], default=0.0)


def random_settings(module: nn.Module) -> list[str]:
    """Return the settings of a module's config that draw random numbers for purposes other than
    dropout.
    """
    config = getattr(module, "config", None)
    return [name for name in _RANDOM if getattr(config, name, None) is not None]


def adapter_faults(model: nn.Module, inner: nn.Module, labelled: bool) -> list[str]:
    """Return the reasons why a PEFT adapter would compute a wrong result from one rank's tokens."""
    # Modules of PEFT around `model` are checked too, because PEFT can wrap a model after `enable`.
    inside = takewhile(lambda x: x is not inner, model.modules())
    return faults_of_adapters([*calling_modules(), *inside], labelled)


def faults_of_adapters(around: Iterable[object], labelled: bool = False) -> list[str]:
    reasons: dict[str, None] = {}  # a dict as an ordered set
    for x in around:
        for name, config in getattr(x, "peft_config", {}).items():
            kind = getattr(config, "peft_type", None)
            kind = getattr(kind, "value", kind)
            added = "another model beside this one" if kind == "SHADOW" else None
            if getattr(config, "is_prompt_learning", False):
                added = "tokens or keys to each row, which shard cannot cut"
            if getattr(config, "is_adaption_prompt", False):
                added = "attention to keys of its own"
            if added is not None:
                how = "use a method that changes weights, such as LoRA"
                reasons[f"adapter {name}: PEFT's {kind} adds {added}: {how}"] = None
            if getattr(config, "alora_invocation_tokens", None):
                reason = "PEFT finds its alora_invocation_tokens in one rank's part of the tokens"
                reasons[f"adapter {name}: {reason}"] = None
            if labelled and getattr(config, "orth_reg_weight", None):
                reason = "PEFT adds a penalty with its orth_reg_weight to the loss of the labels"
                how = "pass your own loss to sp.total"
                reasons[f"labels must be None: adapter {name}: {reason}; {how}"] = None
    return list(reasons)


def _has_parameters(x: nn.Module) -> bool:
    return next(x.parameters(), None) is not None


def configs_of(model: nn.Module) -> Collection[Any]:
    configs = (getattr(x, "config", None) for x in model.modules())
    return {id(x): x for x in configs if x is not None}.values()


def _listed(names: Collection[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(list(names)[:4]) + more


def _related(name: str, layers: Iterable[str]) -> bool:
    return any(_is_inside(name, x) or _is_inside(x, name) for x in layers)


def _is_inside(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _outermost(named: dict[str, str]) -> dict[str, str]:
    return {x: kind for x, kind in named.items() if sum(_is_inside(x, y) for y in named) == 1}
