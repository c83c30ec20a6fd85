"""A cache with transformers' interface. Keys and values stay on the ranks that computed them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from seqpar.core.arguments import Ints, as_int
from seqpar.integrations.huggingface.batch.sharding import KEY
from seqpar.layout.layout import Layout
from seqpar.softmax.module import Attention
from seqpar.softmax.sharded_cache import ShardedCache


class Cache:
    """The keys and values of an enabled model's layers, spread over its ranks; see `sp.cache`.

    The first call of the model with the cache is the prefill, in which each rank computes some of
    the tokens and stores the keys of these tokens. In later calls, every rank computes all new
    tokens and attends to the keys that it stores. The rank that stores the fewest keys also stores
    the new ones (`seqpar.ShardedCache`). Padding is not stored. Reordering of beams and cropping
    need no messages. The object is a `transformers.Cache` and has the methods of that class.

    Attributes:
        store: the `seqpar.ShardedCache` with the keys of layers without a window; None before the
            prefill. Layers with a window have separate stores, which drop old keys.
        layout: the layout of the prefill.
        padding: (B,) integers. The number of padding tokens on the left of each row; None without
            padding.
        decodes: whether the running call is a step after the prefill.
    """

    def __init__(self, attention: Attention, *, block: int, reserve: int) -> None:
        super().__init__(layers=[])  # type: ignore[call-arg]  # transformers' class
        self._attention = attention
        self._options = {
            "block": as_int("block", block, 1),
            "reserve": as_int("reserve", reserve, 0),
        }
        self.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        # Copies of the cache share the model's attention module.
        memo[id(self._attention)] = self._attention
        made = memo[id(self)] = type(self).__new__(type(self))
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ValueError(
            "past_key_values of sp.cache() cannot be pickled, since its keys are on several ranks"
        )

    def __repr__(self) -> str:
        return f"Cache({self.get_seq_length()} tokens over {self._attention.ranks} ranks)"

    def __len__(self) -> int:
        return len(self._windows)

    def reset(self) -> None:
        self.store: ShardedCache | None = None
        self.layout: Layout | None = None
        self.padding: Tensor | None = None
        self.decodes = False
        self._columns = self._new = 0
        # The layer that has called `update` and has not attended yet.
        self._updated: int | None = None
        # Keys and values by layer, until the prefill ends.
        self._filled: dict[int, tuple[Tensor, Tensor]] = {}
        self._windows: dict[int, int | None] = {}  # the window of each layer in the prefill
        self._stores: dict[int | None, ShardedCache] = {}

    def is_of(self, attention: Attention) -> bool:
        return self._attention is attention

    def begin(self, layout: Layout, columns: int, padding: Ints) -> None:
        self.reset()
        self.store, self.layout = ShardedCache(self._attention, layout, **self._options), layout
        self._stores = {None: self.store}
        self.padding = torch.from_numpy(padding) if padding.any() else None
        self._new = columns

    def extend(self, tokens: int) -> None:
        for store in self._stores.values():
            store.extend(tokens)
        self.decodes, self._new = True, tokens

    def finish(self) -> None:
        if not self.decodes:
            self._keep()
        self._columns, self._new = self._columns + self._new, 0

    def abort(self) -> None:
        if self.decodes and self.store is not None:
            self._truncate(self._new)
            self._new = 0
        else:
            self.reset()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's keys and values (1, H, T, D), and return all keys and values of the layer
        that this rank stores.
        """
        if self.store is None or not self._new:
            raise ValueError("past_key_values must be filled by calls of the enabled model")
        if not self.decodes:
            if layer_idx in self._filled:
                raise ValueError(f"past_key_values has the keys of layer {layer_idx} already")
            rows = self.store.layout.tokens_on(self._attention.rank)  # without padding
            k, v = (x[0, :, :rows].transpose(0, 1) for x in (key_states, value_states))
            self._filled[layer_idx] = k, v
        else:
            k, v = (x[0].transpose(0, 1) for x in (key_states, value_states))
            k, v = self._store(layer_idx).append(layer_idx, k, v)
            key_states, value_states = (x.transpose(0, 1)[None] for x in (k, v))
        # `layer_of` reads this attribute for layers that share the keys of an earlier layer.
        setattr(key_states, KEY, layer_idx)
        self._updated = layer_idx
        return key_states, value_states

    def _store(self, layer: int) -> ShardedCache:
        return self._stores[self._windows[layer]]

    def _keep(self) -> None:
        assert self.store is not None and self.layout is not None
        for layer, rows in self._filled.items():
            window = self._windows.setdefault(layer, None)
            if window not in self._stores:
                self._stores[window] = ShardedCache(
                    self._attention, self.layout, window=window, **self._options
                )
            self._stores[window].put(layer, *rows)
        self._filled = {}

    def _truncate(self, dropped: int) -> None:
        most = min(store.droppable for store in self._stores.values())
        if dropped > most:
            raise ValueError(f"tokens_to_remove must be at least {-most}, got {-dropped}")
        for store in self._stores.values():
            store.truncate(store.length - dropped)

    def layer_of(self, key: Tensor) -> int:
        """Return the index of the layer to which `key` belongs.

        `key` must be the result of the last `update`, or computed from this result, or the same
        tensor as the keys of an earlier layer. Otherwise a ValueError is raised.
        """
        layer: int | None = getattr(key, KEY, self._updated)
        if layer is None:
            raise ValueError(
                "its keys must be the tensor that past_key_values.update returned, "
                "got a different tensor"
            )
        return layer

    def rows_of(self, layer: int) -> int:
        """Return how many keys of a layer this rank stores in a decoding step."""
        return self._store(layer).rows

    def attends(self, layer: int, window: int | None) -> None:
        """Record how many earlier keys a query of a layer attends to. None stands for all earlier
        keys.
        """
        self._updated = None
        if not self.decodes:
            known = self._windows.get(layer, window)
            wider = None if known is None or window is None else max(known, window)
            self._windows[layer] = wider

    def attend(self, layer: int, q: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        """Compute attention of a decoding step's queries over the keys of all ranks.

        q is (1, B·T, Hq, D), and the result is (1, B·T, Hq, Dv). key (1, Hkv, rows, D) and value
        (1, Hkv, rows, Dv) are the results of `update`, or computed from these results.
        """
        k, v = (x[0].transpose(0, 1) for x in (key, value))
        out: Any = self._store(layer).decode(q[0], k, v, **options)
        return out[None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns of the rows, padding included."""
        return self._columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys of a mask, and the index of the first key."""
        return self._columns + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        """B, the number of rows; −1 before the prefill."""
        return -1 if self.store is None else self.store.sequences

    @property
    def is_initialized(self) -> bool:
        """Whether the prefill has finished."""
        return self._columns > 0

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens of each row. `tokens_to_remove` is the number of tokens, negated."""
        dropped = -tokens_to_remove
        if dropped < 0:
            expected = "the number of tokens to remove, negated"
            raise ValueError(f"tokens_to_remove must be {expected}, got {tokens_to_remove}")
        if self.store is not None and dropped:
            self._truncate(dropped)
            self._columns -= dropped

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows with these indices, in this order."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([i for i in range(self.batch_size) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows with these indices."""
        self._select(torch.arange(self.batch_size)[indices.cpu()].tolist())

    def _select(self, rows: Sequence[int]) -> None:
        if self.store is not None:
            for store in self._stores.values():
                store.select(rows)
            if self.padding is not None:
                self.padding = self.padding[list(rows)]


@cache
def cache_type() -> type[Cache]:
    from transformers import Cache as TransformersCache

    return type("Cache", (Cache, TransformersCache), {"__doc__": Cache.__doc__})
