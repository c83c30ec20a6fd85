"""The memory of a GPU in a step of a recipe's script, by part.

The script computes in bf16. Parameters, gradients and Adam's moments are in fp32, and FSDP2 shards
them over all GPUs. MLPs, norms and the loss are computed in chunks of tokens. For backward, the
script keeps the input of each layer and, unless backward computes them again, the results of
attention. Different temporary tensors exist at different times of backward. There are four moments
at which the memory can be the largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from seqpar.costs.model import Layer, Model

_FP32, _BF16, _INT64 = 4, 2, 8
# `seqpar.offload` copies the tensors of two layers back before backward needs them.
_LAYERS_AHEAD = 2
# The largest number of fp32 tensors with the shape of a chunk's logits.
_LOGIT_COPIES = 4
# The tensors in a chunk of a gated MLP: gate, up, activation and product, and their gradients.
_MLP_TENSORS = 8


class Keeping(NamedTuple):
    """What is kept from forward to backward.

    Attributes:
        attention: whether the results of attention are kept. Otherwise backward computes them
            again.
        offload: the fraction of the kept tensors that is in host memory.
    """

    attention: bool
    offload: float


@dataclass(frozen=True)
class MemoryAccount:
    """The bytes of each part at the moment that needs the most memory. `moment` is its name."""

    moment: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Footprint:
    """The numbers on which the memory of a GPU depends.

    Attributes:
        model: the shapes of the model.
        head_norms: whether queries and keys are normalized.
        ranks: the number of GPUs over which parameters are sharded.
        tokens: the largest number of tokens on a GPU.
        chunk: the number of tokens in a chunk of MLPs and norms.
        loss_chunk: the number of tokens in a chunk of the loss.
        attention: the bytes of the operands, results and gradients of one layer's attention.
        messages: the bytes of the buffers and partial results of one layer's attention.
        kept_results: the bytes per token of the results of attention in all layers.
    """

    model: Model
    head_norms: bool
    ranks: int
    tokens: int
    chunk: int
    loss_chunk: int
    attention: float
    messages: float
    kept_results: float

    def account(self, keeping: Keeping) -> MemoryAccount:
        always = self._sharded() | {"gathered parameters": self._gathered()}
        always["positions and ids"] = self._positions_and_ids()
        held = self._held(keeping.offload)
        always["layer inputs"] = held * len(self.model.layers) * self._row
        if keeping.attention:
            always["results of attention"] = held * self.tokens * self.kept_results
        accounts = [
            MemoryAccount(moment, always | parts) for moment, parts in self._moments().items()
        ]
        return max(accounts, key=lambda x: x.total)

    def _sharded(self) -> dict[str, float]:
        each = _FP32 * self.model.parameters / self.ranks
        return {"parameters": each, "gradients": each, "optimizer": 2 * each}

    @property
    def _row(self) -> float:
        """The bytes of one bf16 tensor (tokens, hidden) with all tokens of a GPU."""
        return self.tokens * self.model.hidden * _BF16

    @property
    def _largest_layer(self) -> Layer:
        return max(self.model.layers, key=self.model.layer_parameters)

    @property
    def _root_parameters(self) -> int:
        """The number of parameters outside the layers, which stay gathered during a step."""
        inside = sum(map(self.model.layer_parameters, self.model.layers))
        return self.model.parameters - inside

    def _gathered(self) -> float:
        if self.ranks == 1:
            return 0.0
        layers = min(2, len(self.model.layers))
        layer = self.model.layer_parameters(self._largest_layer)
        return _BF16 * (self._root_parameters + layers * layer)

    def _positions_and_ids(self) -> float:
        """Return the bytes of rotary tables, and of the ids, labels and positions of all ranks."""
        tables = 2 * self.tokens * self.model.head_dim * _BF16
        return tables + 3 * self.ranks * self.tokens * _INT64

    def _held(self, offload: float) -> float:
        """Return the fraction of the layers whose kept tensors are on the GPU, if the fraction
        `offload` of kept tensors is offloaded.
        """
        layers = len(self.model.layers)
        copied = offload * max(0, layers - 1 - _LAYERS_AHEAD)
        return (layers - copied) / layers

    def _head_norms(self) -> float:
        if not self.head_norms:
            return 0.0
        width = (self.model.heads + self.model.kv_heads) * self.model.head_dim
        return self.tokens * width * _BF16  # the inputs of the norms of queries and keys

    def _waiting_gradients(self) -> float:
        """Return the bytes of those gradients of parameters that are not yet sharded during the
        backward of a layer.
        """
        if self.ranks == 1:
            return 0.0
        # FSDP2 keeps the fp32 gradients that it has reduced last and, until the end of backward,
        # the gradient of the head.
        layer = self.model.layer_parameters(self._largest_layer)
        return layer * _FP32 + self.model.vocabulary * self.model.hidden * _BF16

    def _moments(self) -> dict[str, dict[str, float]]:
        model, layer = self.model, self._largest_layer
        projected = max(map(model.attention_elements, model.layers)) * self.tokens * _BF16
        ffn = model.ffn_weights(layer, stored=True)
        logits = self.loss_chunk * model.vocabulary * _FP32
        head = model.vocabulary * model.hidden * _FP32
        # These tensors exist beside the sum of the head's gradients: either all copies of a chunk's
        # logits, or two copies and the chunk's summand of the head's gradient.
        loss = head + max(_LOGIT_COPIES * logits, 2 * logits + head)
        ffn_gradients = ffn * (_FP32 + _BF16)
        waiting = self._waiting_gradients()
        # The gradient of a layer's output, and the output of the first norm.
        around = 2 * self._row + self._head_norms()
        return {
            "attention": {
                "attention": self.attention,
                "messages": self.messages,
                "rest of a layer": around,
                "gathered gradients": waiting + ffn * _BF16,
            },
            "MLP": {
                "attention": projected,
                # The input of the second norm, its output, and the gradient of that output.
                "rest of a layer": around + 3 * self._row,
                "MLP": self.chunk * layer.ffn * _MLP_TENSORS * _BF16 + ffn_gradients,
                "gathered gradients": waiting,
            },
            # The input of the last norm, its output, and the gradient of that output.
            "loss": {"loss": loss + 3 * self._row},
            "gradients of embedding and head": {
                "rest of a layer": self._row,
                "gathered gradients": self._root_parameters * (_BF16 + _FP32),
            },
        }
