"""Cut a batch's tensors to one rank's tokens, and put all ranks' tensors together again."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from seqpar.comm.messages.comm import Comm
from seqpar.core.compiling import is_traced
from seqpar.core.torch_private import calling_modules
from seqpar.integrations.huggingface.batch.documents import BatchDocuments
from seqpar.layout.layout import Layout

KEY = "seqpar"  # the key of the Sharding in a batch; also an attribute of modules and tensors


@dataclass(frozen=True, eq=False)
class Side:
    """The tokens of an encoder or of a decoder, and which of these tokens this rank holds."""

    documents: BatchDocuments
    layout: Layout
    index: Tensor  # (T_local,) indices into the B·S tokens; −1 for the layout's padding
    position_ids: Tensor | None
    last_position: int  # the greatest position on any rank
    # Number of padding tokens that the layout adds, at the end of this rank's tokens.
    padding: int = 0
    _chunked: dict[int, Layout] = field(default_factory=dict, repr=False)

    def in_chunks(self, size: int) -> Layout:
        if size not in self._chunked:
            self._chunked[size] = self.layout.chunked(size)
        return self._chunked[size]

    def on(self, device: torch.device) -> Self:
        ids = None if self.position_ids is None else self.position_ids.to(device)
        return replace(self, index=self.index.to(device), position_ids=ids)

    @property
    def tokens(self) -> int:
        """T_local, the number of tokens on this rank."""
        return self.index.numel()

    @property
    def shape(self) -> tuple[int, int]:
        """(B, S), the first two dimensions of the whole batch."""
        return self.documents.rows, self.documents.columns

    def shows_jumps(self) -> bool:
        """Return whether positions jump between two neighbouring tokens of this rank."""
        ids = self.position_ids
        return ids is not None and bool((ids.reshape(-1, self.tokens)[0].diff() != 1).any())

    def take(self, x: Tensor, value: float | None = None, dim: int = 0) -> Tensor:
        """Cut x (…, B, S, …) to this rank's tokens (…, 1, T_local, …). B is dimension `dim`.

        The layout's padding gets `value`. If `value` is None, the padding gets copies of the first
        token.
        """
        index = self.index.to(x.device)
        first = int(self.documents.kept[0])
        padding = index < 0
        held = x.flatten(dim, dim + 1).index_select(dim, index.masked_fill(padding, first))
        if value is not None:
            padding = padding.reshape(-1, *[1] * (held.dim() - 1 - dim))
            held = held.masked_fill(padding, value)
        return held.unsqueeze(dim)

    def put_back(self, x: Tensor, comm: Comm) -> Tensor:
        """Gather x (1, T_local, …) from all ranks to (B, S, …). Padding gets 0."""
        packed = self.layout.unshard(x[0], comm)[: self.documents.kept.size]
        kept = torch.from_numpy(self.documents.kept).to(x.device)
        rows, columns = self.shape
        empty = packed.new_zeros((rows * columns, *packed.shape[1:]))
        return empty.index_copy(0, kept, packed).unflatten(0, (rows, columns))


@dataclass(frozen=True)
class Origin:
    """The kind of model for which a batch was sharded. A different kind of model refuses the
    batch.
    """

    comm: Comm
    # The Python module of the model's class, on which the numbering of positions depends.
    family: str
    shifts: bool | None  # whether each label is the next token


class Opaque:
    """An argument of a model's call that wrappers of the model pass on as one object.

    FSDP, DDP, accelerate and Lightning rebuild dataclasses, named tuples and registered pytrees.
    All other objects are passed on unchanged, copied, or moved by their method `to`.
    """

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        way_out = "call shard in the process that calls the model, not in a DataLoader's worker"
        raise ValueError(f"a sharded batch cannot be pickled: {way_out}")


class Sharding(Opaque):
    """The division of a batch among ranks.

    Attributes:
        main: the tokens that have logits. In a model with encoder and decoder, these are the tokens
            of the decoder.
        labels: the number of labels that count in the loss, on all ranks together. None without
            labels.
        whole: whether the model receives all tokens. A hook of its text model then cuts them.
        origin: the kind of model for which the batch was sharded.
        last_tokens: (B,) indices into the B·S tokens, or None. If the model classifies whole rows,
            these are the tokens from which the results of the rows are computed.
    """

    def __init__(
        self,
        main: Side,
        encoder: Side | None = None,
        labels: int | None = None,
        whole: bool = False,
        origin: Origin | None = None,
        last_tokens: Tensor | None = None,
    ) -> None:
        self.main, self.encoder, self.labels = main, encoder, labels
        self.whole, self.origin, self.last_tokens = whole, origin, last_tokens

    def with_sides(self, main: Side, encoder: Side | None = None) -> Sharding:
        return Sharding(main, encoder, self.labels, self.whole, self.origin, self.last_tokens)

    def to(self, *args: Any, **kwargs: Any) -> Sharding:
        own = self.main.index
        device = own.new_empty(0).to(*args, **kwargs).device
        if device == own.device:
            return self
        encoder = self.encoder and self.encoder.on(device)
        return self.with_sides(self.main.on(device), encoder)

    def digest(self) -> str:
        """Return a text that is equal on all ranks that hold parts of the same batch."""
        parts, described = [], [f"{self.labels} labels"]
        for side in (self.main, self.encoder):
            if side is not None:
                cu_seqlens = side.documents.cu_seqlens.tolist()
                parts += [str(side.layout.tokens_per_rank), str(cu_seqlens)]
                described.append(f"{cu_seqlens[-1]} tokens in {len(cu_seqlens) - 1} documents")
        return f"{', '.join(described)} (digest {_digest('/'.join(parts).encode())})"


def side_of(
    documents: BatchDocuments, layout: Layout, rank: int, position_ids: Tensor, device: torch.device
) -> Side:
    kept = torch.from_numpy(documents.kept).to(device)
    index = layout.shard(kept, rank, value=-1)
    rows, columns = documents.rows, documents.columns
    dim = position_ids.dim() - 2
    whole = position_ids.expand(*position_ids.shape[:dim], rows, columns)
    last = int(whole.max())  # includes padding, as in models that scale by the last position
    padding = int(layout.padding(rank).sum())
    side = Side(documents, layout, index, None, last, padding)
    return replace(side, position_ids=side.take(whole, dim=dim))


def note_tokens(x: Tensor, side: Side) -> None:
    setattr(x, KEY, side)


def has_tokens_of_rank(x: Any) -> bool:
    """Return whether a value is `TokensOfRank`, or a tensor that `note_tokens` marked."""
    noted = isinstance(x, Tensor) and getattr(x, KEY, None) is not None
    return noted or isinstance(x, TokensOfRank)


class TokensOfRank(Tensor):
    """The ids of one rank's tokens, which only an enabled model may look up in its embeddings.

    If a model that is not enabled looks up these ids, or copies or slices of them, in its
    embeddings, a ValueError is raised. All other code can use the ids like any other tensor.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.embedding:
            _check_calling_model()
        found = super().__torch_function__(func, types, args, kwargs or {})
        is_ids = not isinstance(found, cls) or found.dtype in (torch.int32, torch.int64)
        return found if is_ids else found.as_subclass(Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> TokensOfRank:
        made = copy.deepcopy(plain_ids(self), memo).as_subclass(TokensOfRank)
        vars(made).update(vars(self))
        return made


def plain_ids(x: Any) -> Any:
    """Return `TokensOfRank` as a plain tensor, and all other values unchanged."""
    return x.as_subclass(Tensor) if isinstance(x, TokensOfRank) else x


class UnreadableMask(Opaque):
    """The attention mask of a sharded batch that has embeddings in place of ids.

    An enabled model drops this mask. A model that is not enabled raises a ValueError when it reads
    the mask.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise refusal_of_tokens("model")

    def __getitem__(self, index: Any) -> Any:
        raise refusal_of_tokens("model")


def readable(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, but leave out an `UnreadableMask`."""
    return {name: x for name, x in batch.items() if not isinstance(x, UnreadableMask)}


def _check_calling_model() -> None:
    """Raise a ValueError if a transformers model is running that is not enabled."""
    from transformers import PreTrainedModel

    if is_traced():  # torch.compile cannot trace the search for the models that are being called
        raise refusal_of_tokens("compiled model")
    calling = [x for x in calling_modules() if isinstance(x, PreTrainedModel)]
    others = list(takewhile(lambda x: all(KEY not in vars(y) for y in x.modules()), calling))
    if others:
        raise refusal_of_tokens(type(others[-1]).__name__)


def refusal_of_tokens(model: str) -> ValueError:
    way_out = "enable it with seqpar's huggingface.enable, or give it the whole batch"
    return ValueError(
        f"model must be enabled by seqpar for a sharded batch, and this {model} is not: {way_out}"
    )


def digest_of(x: Any) -> str | None:
    if not isinstance(x, Tensor):
        return None
    data = x.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(x.shape)} (digest {_digest(data.tobytes())})"


def scalars_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those arguments that are numbers, strings or one-element tensors, as values for
    JSON.
    """
    found = {name: x.item() if _has_one(x) else x for name, x in values.items()}
    return {str(name): x for name, x in found.items() if isinstance(x, int | float | str)}


def _has_one(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 0


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]  # short enough for an error message
