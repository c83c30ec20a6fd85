"""The public cache of keys and values on attention servers, for decoding.

Legend: B batch, T new tokens, Hq query heads, Hkv KV heads, D head dim (Dv of values).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, NoReturn, Unpack

from torch import Tensor

from seqpar.attention.operands import OperandShape, check_operands, fold_scale, prepare_operands
from seqpar.comm.dtensor import local_heads
from seqpar.core.arguments import MAX_DOCUMENT_TOKENS, WindowSize, as_int, check_tensor, shown
from seqpar.core.compiling import outside_graphs
from seqpar.core.dtypes import DTYPES
from seqpar.servers.cache.attend_options import AttendKeywords, AttendOptions
from seqpar.servers.pool.pool import ServerPool
from seqpar.servers.wire.limits import MAX_HEAD_DIM, MAX_HEADS
from seqpar.servers.wire.pages import RowShape
from seqpar.softmax.decode import refuse_gradients, unknown_layer

Rebuild = Callable[[Hashable, int, int], tuple[Tensor, Tensor]]

if TYPE_CHECKING:
    from seqpar.servers.cache.layer_cache import LayerCache, ServerAnswer, Source


class ServerCache:
    """The keys and values of a model's layers, stored by attention servers.

    `put` stores the keys and values of the prefill. A *step* of decoding begins with `extend`.
    Then, for each layer, `attend` sends the queries, keys and values of the new tokens, and returns
    attention over all keys. Each call of `attend` sends B·T·(Hq·D + Hkv·(D + Dv)) elements, and
    receives B·T·Hq·(Dv + 1) numbers in fp32, or in fp64 if the queries are fp64. These sizes do not
    depend on the length of the sequences.

    A layer is stored by the server that has the most free memory. With `segment`, a layer is cut
    into segments of `segment` tokens. Each segment is stored by the server that has the most free
    memory when the segment begins. This process keeps a copy of all keys and values in its own
    memory. If a server loses its keys and values, because it dies, hangs, leaves or is restarted,
    this process sends the copy to any other server. If there is no other server, this process
    computes the step. The result has the same bits on the same hardware. If the pool has
    `home=False`, this process never computes, and a step that no server computes in time raises a
    `seqpar.ServersError`.

    All sequences of a batch have the same length. If sequences have different lengths, use one
    cache for each length. `post` lets the steps of several caches run at the same time. A cache
    computes no gradients. Use a cache in one thread only. To free the servers' memory, call
    `close`, or use the cache in a `with` statement. The memory is also freed when Python's garbage
    collector collects the cache.

    Chen et al., "Efficient Heterogeneous Large Language Model Decoding with Model-Attention
    Disaggregation" (2024, Lamina); StepFun, "Step-3 is Large yet Affordable" (2025).

    Args:
        pool: the servers. The pool must have `sample=0`.
        length: the number of tokens of each sequence in the prefill.
        segment: the largest number of tokens in one segment of a layer. With a limit, several
            servers store a long layer and compute its attention at the same time. By default there
            is no limit.
        rebuild: a function that is called with (layer, start, stop) and returns (k, v) of the
            tokens start … stop − 1 of a layer. k and v must have the same bits as the tensors that
            were passed to `put` and `attend`. With `rebuild`, this process keeps no copy of keys
            and values, and calls the function if a server has lost tokens of finished steps.

    Raises:
        ValueError: if an argument is wrong, here or in a method. The message names the argument.
            Nothing was sent or stored.
    """

    @outside_graphs
    def __init__(
        self,
        pool: ServerPool,
        length: int = 0,
        *,
        segment: int | None = None,
        rebuild: Rebuild | None = None,
    ) -> None:
        if not isinstance(pool, ServerPool):
            raise ValueError(f"pool must be a seqpar.ServerPool, got {shown(pool)}")
        # Importing this file needs the packages of the extra `serve`, which a pool has imported.
        from seqpar.servers.cache.layer_cache import SegmentServers

        dispatcher = pool.dispatcher()
        if sample := dispatcher.options.sample:
            reason = "results of caches are not checked; connect a second pool with sample=0"
            raise ValueError(f"pool must have sample=0, got sample={sample}: {reason}")
        if not (rebuild is None or callable(rebuild)):
            raise ValueError(f"rebuild must be a function or None, got {shown(rebuild)}")
        self._rebuild = rebuild
        self._length = as_int("length", length, 0, MAX_DOCUMENT_TOKENS)
        longest = MAX_DOCUMENT_TOKENS if segment is None else segment
        self._segment = as_int("segment", longest, 1, MAX_DOCUMENT_TOKENS)
        self._layers: dict[Hashable, LayerCache] = {}
        self._new = 0  # the number of tokens that the current step appends
        self._pool, self._servers = pool, SegmentServers(dispatcher)
        self._close = weakref.finalize(self, self._servers.forget_all)

    @property
    def length(self) -> int:
        """The number of tokens of each sequence."""
        return self._length

    @property
    def held(self) -> dict[str, int]:
        """The bytes of memory that each server uses after the last finished steps, by the server's
        address.
        """
        held: dict[str, int] = {}
        for layer in self._layers.values():
            for address, nbytes in layer.held():
                held[address] = held.get(address, 0) + nbytes
        return held

    @outside_graphs
    def put(self, layer: Hashable, k: Tensor, v: Tensor) -> None:
        """Store a layer's keys and values of all tokens on servers.

        k is (T, Hkv, D) and v (T, Hkv, Dv), or (B, T, Hkv, D) and (B, T, Hkv, Dv). If the cache
        has this layer already, the new keys and values replace the old ones.
        """
        from seqpar.servers.cache.layer_cache import LayerCache

        self._check_open()
        self._pool.dispatcher()  # raises in a forked process
        refuse_gradients(k=k, v=v)
        (k, v), _ = local_heads({"k": (k, -2), "v": (v, -2)})
        self._check_tokens(self._length, k=k, v=v)
        batched, (_, k, v) = k.dim() == 4, prepare_operands(k, k, v)
        check_operands(k, k, v, self._length, self._length)
        shape = RowShape.of(k, v)
        for requirement, size, least, most in (
            ("k must have {} heads", shape.kv_heads, 1, MAX_HEADS),
            ("k must have a head dim of {}", shape.dim, 1, MAX_HEAD_DIM),
            ("v must have a head dim of {}", shape.value_dim, 1, MAX_HEAD_DIM),
            ("k must have a batch size of {}", shape.batch, 1, 2**20),
        ):
            if not least <= size <= most:
                expected = requirement.format(f"{least} to {most}")
                raise ValueError(f"{expected} on servers, got {size}")
        if (old := self._layers.get(layer)) is not None:
            _check_answered(layer, old)
            old.forget()
        source = self._source(layer, batched)
        kept = LayerCache(self._servers, shape, self._segment, batched, source)
        self._layers[layer] = kept
        kept.append(k, v)
        kept.send()

    @outside_graphs
    def extend(self, tokens: int = 1) -> None:
        """Begin a step that appends this many tokens to each sequence."""
        self._check_open()
        new = as_int("tokens", tokens, 1, MAX_DOCUMENT_TOKENS - self._length)
        self._check_all_answered()
        self._length, self._new = self._length + new, new

    @outside_graphs
    def truncate(self, length: int) -> None:
        """Keep only the first `length` tokens, for example after rejected speculative tokens."""
        self._check_open()
        length = as_int("length", length, 0, self._length)
        self._check_all_answered()
        self._length, self._new = length, 0
        for layer in self._layers.values():
            layer.truncate(length)

    @outside_graphs
    def attend(
        self, layer: Hashable, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttendKeywords]
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Store the keys and values of a step's new tokens, and return attention of their queries.

        A step is a decoding step, which begins with `extend`. The queries attend to the keys of all
        tokens, including the new tokens.

        After an error other than a ValueError, call `truncate` and `extend` to repeat the step.

        Args:
            layer: a layer that was stored with `put`.
            q: the queries of the step's T tokens, (T, Hq, D), or (B, T, Hq, D) if the tensors that
                `put` got have a batch dimension.
            k, v: the keys (T, Hkv, D) and values (T, Hkv, Dv) of these tokens. If q has a batch
                dimension, they have one too. q, k and v can be DTensors that shard heads; each rank
                then needs its own pool and its own cache.
            options: `causal` (default: True), `window_size`, `softmax_scale`, `softcap`, `sinks`
                and `return_lse`, with the same meaning as in a call of a strategy.

        Returns:
            out (T, Hq, Dv) or (B, T, Hq, Dv), in q's dtype. With `return_lse`, it returns (out,
            lse): lse is (T, Hq) or (B, T, Hq), in fp32 or, for fp64 queries, in fp64. lse is
            computed over the keys only, without the sinks.
        """
        return self.post(layer, q, k, v, **options).result()

    @outside_graphs
    def post(
        self,
        layer: Hashable,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = True,
        window_size: WindowSize = (-1, -1),
        softmax_scale: float | Tensor | None = None,
        softcap: float | None = 0.0,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> ServerAnswer:
        """Start the computation of `attend`, and return a `ServerAnswer` at once.

        `result()` of the answer waits for the result. Until then, steps of other caches and other
        work of the model can run. The tensors are copied, so you can change them after this call.
        Call `result()` before you call `attend` or `post` for the same layer again.
        """
        self._check_open()
        kept = self._layers.get(layer)
        if kept is None:
            raise unknown_layer(layer, self._layers)
        if not self._new or kept.length != self._length - self._new:
            lag = f"has {kept.length} of {self._length} tokens"
            raise ValueError(f"layer {layer!r} must attend once in each step of extend: it {lag}")
        _check_answered(layer, kept)
        refuse_gradients(q=q, k=k, v=v, sinks=sinks, softmax_scale=softmax_scale)
        tensors = {"q": (q, -2), "k": (k, -2), "v": (v, -2), "sinks": (sinks, 0)}
        scales = {"softmax_scale": (softmax_scale, 0)}
        (q, k, v, sinks, softmax_scale), heads = local_heads({**tensors, **scales})
        self._check_tokens(self._new, q=q, k=k, v=v)
        if (q.dim() == 4) != kept.batched:
            raise ValueError(f"q must have {3 + kept.batched} dimensions, got {tuple(q.shape)}")
        q, scale = fold_scale("softmax_scale", q, softmax_scale)
        q, k, v = prepare_operands(q, k, v, sinks=sinks)
        check_operands(q, k, v, self._new, self._new)
        if (shape := RowShape.of(k, v)) != kept.shape:
            raise ValueError(f"k and v must be like those at put, {kept.shape}, got {shape}")
        operands = OperandShape.of(q, k, v)
        options = AttendOptions.of(
            operands,
            causal=causal,
            window_size=window_size,
            softmax_scale=scale,
            softcap=softcap,
            sinks=None if sinks is None else sinks.detach().clone(),
            return_lse=return_lse,
        )
        self._pool.dispatcher()  # raises in a forked process
        kept.append(k, v)
        return kept.ask(q.detach().clone(), options, heads)

    def close(self) -> None:
        """Free the memory on the servers. After `close`, the cache cannot be used."""
        self._close()
        self._layers.clear()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ServerCache can be neither copied nor pickled: servers hold what it has")

    def __enter__(self) -> ServerCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _source(self, layer: Hashable, batched: bool) -> Source | None:
        rebuild = self._rebuild
        if rebuild is None:
            return None

        def rows(start: int, stop: int) -> object:
            rebuilt = rebuild(layer, start, stop)
            if not batched and isinstance(rebuilt, tuple):
                return tuple(x[None] if isinstance(x, Tensor) else x for x in rebuilt)
            return rebuilt

        return rows

    def _check_open(self) -> None:
        if not self._close.alive:
            raise ValueError("the cache was closed: make a new one")

    def _check_tokens(self, tokens: int, **operands: Tensor) -> None:
        for name, x in operands.items():
            check_tensor(name, x)
            if x.dtype not in DTYPES or x.is_meta:
                given = f"{x.dtype} on {x.device}"
                expected = f"one of the dtypes {DTYPES} and not be on the meta device"
                raise ValueError(f"{name} must have {expected}, got {given}")
            if x.dim() not in (3, 4) or x.shape[-3] != tokens:
                expected = f"({tokens}, H, D) or (B, {tokens}, H, D)"
                given = str(tuple(x.shape))
                raise ValueError(
                    f"{name} must have the {tokens} tokens to store, {expected}, got {given}"
                )

    def _check_all_answered(self) -> None:
        for name, layer in self._layers.items():
            _check_answered(name, layer)


def _check_answered(name: Hashable, layer: LayerCache) -> None:
    if layer.is_busy:
        raise ValueError(
            f"layer {name!r} has an answer already: first call result() of that answer"
        )
