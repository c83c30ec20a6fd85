"""Tokens exchanged for heads: what is kept for backward, and how much is packed into a message."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Layout
from tests.support.calls import local
from tests.support.cases import Case, assert_right, cu_seqlens, layouts, module, oracle, run
from tests.support.ranks import virtual
from tests.support.tiers import examples, few_rows

DOCUMENTS = [0, 30, 31, 90]
KEYS = Layout.striped([0, 40, 44, 100], 4, 2)
CALLS = {
    "plain": {},
    "sinks": {"sinks": True, "dlse": True},
    "other keys": {"kv_layout": KEYS, "dlse": True, "window": (20, 3)},
    "batch": {"batch": 2, "value_dim": 5, "window": (9, 0)},
}


def case(strategy, layout=None, **options):
    layout = layout or Layout.zigzag(DOCUMENTS, 4)
    return Case(strategy, layout, True, **{"heads": 6, "kv_heads": 3} | options)


def keeping(x, keep, groups=2):
    return dataclasses.replace(x, module_options=(("head_groups", groups), ("keep", keep)))


@few_rows()
@pytest.mark.parametrize("options", CALLS)
@pytest.mark.parametrize("strategy", ["ulysses", "usp", "usp+all_gather", "usp+token_ring"])
def test_tokens_that_are_kept_give_the_same_gradients(strategy, options):
    """With any number of groups; out and lse have the bits that they have with kept heads.

    Bits may depend on the number of groups, since BLAS's depend on how many heads a call has.
    """
    x = case(strategy, **CALLS[options])
    expected = virtual(4, run, keeping(x, "heads"))[0]
    for groups in (1, 3):
        heads = virtual(4, run, keeping(x, "heads", groups))[0]
        tokens = virtual(4, run, keeping(x, "tokens", groups))[0]
        assert (tokens[0] == heads[0]).all() and (tokens[1] == heads[1]).all()
        assert_right(tokens, expected, x.dtype)


@examples(7, 70)
@given(st.data())
def test_any_layout_and_numbers_of_heads(data):
    """Heads that do not divide by ranks, KV heads on several ranks, ranks without heads or tokens,
    keys that are other tokens."""
    cu, kv_cu = (data.draw(cu_seqlens(40, documents=2)) for _ in range(2))
    kv_heads = data.draw(st.integers(1, 4))
    x = Case(
        data.draw(st.sampled_from(["ulysses", "usp"])),
        data.draw(layouts(cu, 4)),
        data.draw(st.booleans()),
        kv_layout=data.draw(st.none() | layouts(kv_cu, 4)),
        heads=kv_heads * data.draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        sinks=data.draw(st.booleans()),
        dlse=data.draw(st.booleans()),
    )
    x = keeping(x, data.draw(st.sampled_from(["heads", "tokens"])), data.draw(st.integers(1, 3)))
    assert_right(virtual(4, run, x)[0], oracle(x), x.dtype)


def saved(comm, keep):
    """Bytes that autograd saves for backward beside the call's arguments and results."""
    layout = Layout.zigzag(256, comm.size)
    q, k, v = local(layout, comm.rank, heads=8, kv_heads=8)
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out, lse = module("ulysses", comm, keep=keep)(q, k, v, layout, causal=True, return_lse=True)
    for x in (q, k, v, out, lse):
        kept.pop(x.untyped_storage().data_ptr(), None)
    rows = q.numel() // q.shape[-1] * q.element_size()
    return sum(size for size in kept.values() if size >= rows // 2), q.nbytes, rows


def test_what_is_kept_for_backward():
    for heads, q, lse in virtual(4, saved, "heads"):
        assert heads == 4 * q + lse
    for tokens, *_ in virtual(4, saved, "tokens"):
        assert tokens == 0


def messages(comm, strategy, kv_layout, keep):
    """Of each exchange of a call and its backward: how many messages go to each peer."""
    found, exchange = [], comm.exchange

    def counting(sends, recvs, **named):
        found.append([peer for peer, tensor in sends if tensor.numel()])
        return exchange(sends, recvs, **named)

    comm.exchange = counting
    layout = Layout.zigzag(DOCUMENTS, comm.size)
    q, k, v = local(layout, comm.rank, heads=8, kv_heads=8)
    if kv_layout is not None:
        k, v = local(kv_layout, comm.rank, heads=8, kv_heads=8)[1:]
    attn = module(strategy, comm, head_groups=1, keep=keep)
    attn(q.float(), k.float(), v.float(), layout, causal=True, kv_layout=kv_layout).sum().backward()
    return [sent.count(peer) for sent in found for peer in set(sent)]


@pytest.mark.parametrize(("kv_layout", "keep", "expected"), [
    (None, "heads", [1, 1, 1, 1]),
    (Layout.zigzag(DOCUMENTS, 4), "heads", [1, 1, 1, 1]),
    (KEYS, "heads", [2, 1, 1, 2]),
    (KEYS, "tokens", [2, 1, 2, 2]),
    (None, "tokens", [1, 1, 1, 1]),
])  # fmt: skip
def test_a_peer_gets_one_message_per_kind(kv_layout, keep, expected):
    """q, k and v together; out, and where tokens are kept lse; dout and what comes with it; dq, dk
    and dv together. In fp32, since lse is."""
    for found in virtual(4, messages, "ulysses", kv_layout, keep):
        assert found == [count for count in expected for _ in range(3)]
