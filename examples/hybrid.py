"""LASP-2H's model: layers of linear attention, with softmax attention in every n-th layer.

Here `attend` takes gates too. With `log_decay` (H,), it computes linear attention with this decay.
With `log_decay` and `beta` (T, H), it computes the gated delta rule. Without gates, it computes
softmax attention. H is the number of heads; `model.py` explains the other letters.
"""

import itertools

import torch
import torch.nn.functional as F
from model import Attend, Layer, Transformer
from torch import Tensor, nn


class Hybrid(Transformer):
    """A transformer with softmax attention in every `softmax_every`-th layer.

    The other layers have linear attention of the kind `linear`, "constant_decay" or "gated_delta",
    optionally with a norm and a gate.
    """

    def __init__(
        self, layers: int = 4, softmax_every: int = 4, norm: bool = True, gate: bool = True,
        linear: str = "constant_decay", dim: int = 128, heads: int = 4, kv_heads: int = 2,
    ) -> None:  # fmt: skip
        super().__init__(dim=dim, layers=0)
        linear_layer = {"constant_decay": LinearLayer, "gated_delta": GatedDeltaLayer}[linear]
        for i in range(layers):
            softmax = (i + 1) % softmax_every == 0
            self.layers.append(
                Layer(dim, heads, kv_heads)
                if softmax
                else linear_layer(dim, log_decays(heads, i, layers), norm, gate)
            )


class LinearLayer(Layer):
    """A layer with TransNormerLLM's attention: norm(linear(silu q, silu k, v)) ⊙ gate.

    It replaces softmax attention (Qin et al. 2023, section 3). RoPE is not needed, because the
    decay depends on the distance of tokens. The norm covers all heads and has no weights
    (SRMSNorm). The gate is the sigmoid of a projection of the input, as in later models of the
    family; the first ones had no sigmoid.
    """

    kind = "linear"

    def __init__(self, dim: int, log_decay: Tensor, norm: bool, gate: bool) -> None:
        super().__init__(dim, len(log_decay), len(log_decay))
        self.norm = norm
        self.gate = nn.Linear(dim, dim, bias=False) if gate else None
        self.register_buffer("log_decay", log_decay)

    def mix(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.heads(x)
        out = self.remember(x, F.silu(q), F.silu(k), v, attend).flatten(1)
        if self.norm:
            out = F.rms_norm(out, out.shape[-1:], eps=1e-6)
        return out if self.gate is None else out * self.gate(x).sigmoid()

    def remember(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
        """Return linear attention of these heads of x."""
        return attend(q, k, v, log_decay=self.log_decay)


class GatedDeltaLayer(LinearLayer):
    """A layer with a Gated DeltaNet: keys of length 1, a decay and a β per token and head.

    Yang, Kautz and Hatamizadeh 2025, section 3.3, without the short convolution.
    """

    def __init__(self, dim: int, log_decay: Tensor, norm: bool, gate: bool) -> None:
        super().__init__(dim, log_decay, norm, gate)
        self.gates = nn.Linear(dim, 2 * len(log_decay), bias=False)

    def remember(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
        decay, beta = self.gates(x).float().chunk(2, -1)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        log_decay = self.log_decay * F.softplus(decay)
        return attend(q, k, v, log_decay=log_decay, beta=beta.sigmoid())


def log_decays(heads: int, layer: int, layers: int) -> Tensor:
    """Return (H,): log λ of layer l = 0 … L − 1, −2^(−8h/H) · (1 − l/L) for heads h = 1 … H.

    Deeper layers therefore remember longer. 2^(−8h/H) is from the released code. The paper prints
    8h/H; 4 heads would then remember only a few tokens.
    """
    h = torch.arange(1, heads + 1)
    return -(2.0 ** (-8 * h / heads)) * (1 - layer / layers)


def linear_by_document(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, cu_seqlens: list[int]
) -> Tensor:
    """Return linear attention without seqpar, for comparison: (Q Kᵀ ⊙ Λ) V per document and head.

    q, k and v are (T, H, D), of all tokens; Λ has the decays.
    """
    documents = []
    for start, stop in itertools.pairwise(cu_seqlens):
        position = torch.arange(stop - start, device=q.device)
        distance = (position[:, None] - position).clamp(min=0)
        heads = zip(log_decay, *(x[start:stop].unbind(1) for x in (q, k, v)), strict=True)
        documents.append(
            torch.stack(
                [(qh @ kh.T * (rate * distance).exp().tril()) @ vh for rate, qh, kh, vh in heads], 1
            )
        )
    return torch.cat(documents)


def gated_delta_by_document(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, cu_seqlens: list[int]
) -> Tensor:
    """Return the gated delta rule without seqpar, for comparison: token by token, in fp64.

    q, k and v are (T, H, D), log_decay and beta (T, H), of all tokens.
    """
    outs, starts, dtype = [], set(cu_seqlens), q.dtype
    q, k, v, log_decay, beta = (x.double() for x in (q, k, v, log_decay, beta))
    state = torch.zeros_like(k[0, :, :, None] * v[0, :, None, :])  # (H, D, D)
    for t, tensors in enumerate(zip(q, k, v, log_decay.exp(), beta, strict=True)):
        if t in starts:
            state = torch.zeros_like(state)
        q_t, k_t, v_t, decay, rate = (x[..., None] for x in tensors)
        state = state * decay[..., None]
        error = v_t - state.mT @ k_t
        state = state + rate[..., None] * k_t @ error.mT
        outs.append((state.mT @ q_t)[..., 0])
    return torch.stack(outs).to(dtype)
