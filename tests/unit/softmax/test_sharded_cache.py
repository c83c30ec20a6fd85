"""ShardedCache: a prefill and decoding steps on ranks against attention over the whole sequence."""

import pytest
import torch

import seqpar
from seqpar import Layout, ShardedCache
from seqpar.softmax.sharded_cache import SPARE
from tests.support.cases import module
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

LENGTH, LAYERS = 21, ("first", 1)


def drawn(tokens, batch=(2,)):
    """q, k and v of both layers, GQA: (batch, tokens, heads, dim)."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(*batch, tokens, heads, dim) for heads, dim in ((4, 8), (2, 8), (2, 6))] * 2
    x = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return dict(zip(LAYERS, (x[:3], x[3:]), strict=True))


def part(tensors, rows):
    return [x[..., rows, :, :] for x in tensors]


def expected(tensors, stop, tokens, options):
    """Attention of the last tokens of a sequence of so many, by a module on one rank."""
    q, k, v = part(tensors, slice(stop))
    queries = Layout.contiguous(tokens, 1), Layout.contiguous(stop, 1)

    def attend(comm):
        last = q[..., stop - tokens :, :, :]
        attn = module("ring", comm)
        return attn(last, k, v, queries[0], kv_layout=queries[1], causal=True, **options)

    return virtual(1, attend)[0]


OPTIONS = {
    "plain": {},
    "window": {"window_size": (4, 0)},
    "sinks and softcap": {
        "sinks": torch.linspace(-1, 1, 4, dtype=torch.float64),
        "softcap": 2.0,
        "softmax_scale": 0.4,
    },
}
# (block, reserve, batch, layout of the prefill)
CACHES = [
    (1, 0, (2,), Layout.zigzag(LENGTH, 3)),
    (4, 9, (2,), Layout.contiguous(LENGTH, 3)),
    (64, 0, (), Layout.striped(LENGTH, 3, stripe=2)),
]


@few_rows()
@pytest.mark.parametrize(("block", "reserve", "batch", "layout"), CACHES)
@pytest.mark.parametrize("name", OPTIONS)
def test_steps_equal_one_device(name, block, reserve, batch, layout):
    """Blocks of one and of several tokens, of which some are dropped again."""
    steps, tensors, options = (1, 3, 1, 2, 1, 1, 4), drawn(LENGTH + 13, batch), OPTIONS[name]

    def decode(comm):
        attn = module("ring", comm)
        cache, outs = ShardedCache(attn, layout, block=block, reserve=reserve), []
        for layer, (_, k, v) in tensors.items():
            prompt = (x[..., :LENGTH, :, :] for x in (k, v))
            cache.put(layer, *(layout.shard(x, comm.rank, -3) for x in prompt))
        for tokens in steps:
            cache.extend(tokens)
            rows = slice(cache.length - tokens, cache.length)
            for layer in LAYERS:
                outs.append(cache.attend(layer, *part(tensors[layer], rows), **options))
            if tokens == 3:  # two of them were not accepted
                cache.truncate(cache.length - 2)
        assert cache.length == LENGTH + sum(steps) - 2 == cache.layout.tokens
        return outs

    results = virtual(3, decode)
    stop, i = LENGTH, 0
    for tokens in steps:
        stop += tokens
        for layer in LAYERS:
            right = expected(tensors[layer], stop, tokens, options)
            for outs in results:
                assert torch.allclose(outs[i], right, rtol=0, atol=1e-12)
            i += 1
        stop -= 2 * (tokens == 3)


def test_new_tokens_go_to_the_least_filled_rank():
    layout = Layout.from_spans([[(0, 0, 6)], [(0, 6, 8)], [(0, 8, 12)]], 12)

    def fill(comm):
        cache, counts = ShardedCache(module("ring", comm), layout, block=2), []
        for _ in range(9):
            cache.extend()
            counts.append(tuple(cache.layout.tokens_per_rank))
        return counts

    counts = virtual(3, fill)[0]
    assert counts[1] == (6, 4, 4) and counts[3] == (6, 6, 4) and counts[5] == (6, 6, 6)
    assert counts[-1] == (8, 7, 6)


def test_traffic_does_not_depend_on_the_context():
    def sent(comm, length):
        attn, layout = module("ring", comm), Layout.zigzag(length, 4)
        cache = ShardedCache(attn, layout, reserve=8)
        k = torch.zeros(2, layout.tokens_on(comm.rank), 2, 4)
        cache.put(0, k, k)
        before, counts = attn.sent_bytes, []
        for tokens in (1, 3):
            cache.extend(tokens)
            new = torch.zeros(2, tokens, 2, 4)
            cache.attend(0, torch.zeros(2, tokens, 6, 4), new, new)
            counts.append(attn.sent_bytes - before)
        return counts

    rows = 3 * 2 * 6 * (4 + 1) * 4  # to 3 ranks, of 2 sequences: out and lse of 6 heads in fp32
    for length in (8, 4096):
        assert virtual(4, sent, length) == [[rows, 4 * rows]] * 4


def begun(comm):
    layout = Layout.contiguous(12, 3)
    cache, k = ShardedCache(module("ring", comm), layout), torch.zeros(4, 2, 8)
    cache.put(0, k, k)
    cache.put(1, k, k)
    return cache


Q, K = torch.zeros(1, 4, 8), torch.zeros(1, 2, 8)
WRONG = [
    (
        lambda cache: (cache.extend(), cache.attend(0, Q, K.clone().requires_grad_(), K)),
        "k must require no gradient",
    ),
    (lambda cache: cache.put(2, K, K), "k must have the 4 tokens of this rank"),
    (lambda cache: cache.attend(0, Q, K, K), "layer 0 must attend once in each step of extend"),
    (lambda cache: cache.extend(0), "tokens must be at least 1"),
    (lambda cache: cache.extend(2**40), "tokens must be at most 2147483635"),
    (lambda cache: cache.truncate(13), "length must be at most 12"),
    (
        lambda cache: (cache.extend(), cache.attend("0", Q, K, K)),
        r"layer must be one that put has stored, \[0, 1\], got '0': call put\(layer, k, v\)",
    ),
    (
        lambda cache: seqpar.ShardedCache(cache.attn, cache.layout).attend(0, Q, K, K),
        "layer must be one that put has stored, none yet, got 0: call put",
    ),
    (lambda cache: (cache.extend(2), cache.attend(0, Q, K, K)), "q must have 3 dim.* 2 tokens"),
    (lambda cache: (cache.extend(), cache.attend(0, Q, Q, K)), "k must be like the cache's"),
    (lambda cache: (cache.extend(), cache.attend(0, Q, K, K.double())), "v must be like"),
    (
        lambda cache: (cache.extend(), cache.extend(), cache.attend(1, Q, K, K)),
        "layer 1 must attend once in each step of extend: it has 12 of 14 tokens",
    ),
    (lambda cache: cache.select([]), "sequences must have at least one"),
    (lambda cache: cache.select([1]), r"sequences\[0\] must be at most 0"),
    (lambda cache: (cache.extend(), cache.select([0])), "sequences must be selected after all"),
    (
        lambda cache: (cache.extend(), cache.attend(0, Q, K, K, chunk=2, prefix_lens=[3])),
        "prefix_lens must be None",
    ),
    (lambda cache: (cache.extend(), cache.attend(0, Q, K, K, chunk=0)), "chunk must be at least 1"),
    (lambda cache: ShardedCache(cache.attn, Layout.zigzag([0], 3)), "layout must have a document"),
    (lambda cache: ShardedCache(cache.attn, Layout.zigzag(9, 2)), "layout must be for the mod"),
    (lambda cache: ShardedCache(3, cache.layout), "attn must be an attention module"),
    (lambda cache: ShardedCache(cache.attn, cache.layout, block=0), "block must be at least 1"),
    (lambda cache: ShardedCache(cache.attn, cache.layout, reserve=-1), "reserve must be at least"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[x[1] for x in WRONG])
def test_refusals_name_the_argument(call, message):
    def refused(comm):
        cache = begun(comm)
        with pytest.raises(ValueError, match=message):
            call(cache)

    virtual(3, refused)


def test_a_refused_layer_has_not_attended():
    def run(comm):
        cache = begun(comm)
        cache.extend()
        with pytest.raises(ValueError, match="softcap"):
            cache.attend(0, Q, K, K, softcap=-1.0)
        cache.attend(1, Q, K, K)
        with pytest.raises(ValueError, match="sequences must be selected after all"):
            cache.select([0])
        cache.attend(0, Q, K, K)
        cache.select([0])

    virtual(3, run)


def test_empty_beginnings_and_full_crops_work():
    def decode(comm):
        layout, none = Layout.contiguous(0, 2), torch.zeros(0, 1, 4)
        cache = seqpar.ShardedCache(module("ring", comm), layout)
        cache.put(0, none, none)
        cache.extend(3)
        cache.truncate(0)
        cache.extend(2)
        k = torch.tensor([1.0, 3.0])[:, None, None].expand(2, 1, 4)
        return cache.attend(0, torch.zeros(2, 1, 4), k, k)

    for out in virtual(2, decode):
        assert torch.equal(out[:, 0, 0], torch.tensor([1.0, 2.0]))


def test_what_was_put_is_not_written_to():
    """Nor where the cache was cut back to less than the prefill, so that there is room."""
    layout = Layout.contiguous(12, 3)

    def on_rank(comm):
        cache, k = ShardedCache(module("ring", comm), layout), torch.zeros(4, 2, 8)
        with torch.inference_mode():
            cache.put(0, k, k)
            cache.truncate(10)
            cache.extend(2)
            new = torch.ones(2, 2, 8)
            cache.attend(0, torch.zeros(2, 4, 8), new, new)
        with torch.no_grad():
            cache.extend(2)
            cache.attend(0, torch.zeros(2, 4, 8), new, new)
        return k.count_nonzero()

    assert virtual(3, on_rank) == [0, 0, 0]


# Of three sequences, which one rank has all of, which all have, and which is one token.
LENGTHS = (5, 21, 1)
SEVERAL = Layout.from_spans(
    [[(0, 0, 5), (1, 0, 4), (1, 13, 17)], [(1, 4, 13)], [(1, 17, 21), (2, 0, 1)]],
    [0, 5, 26, 27],
)


def of_several(stop=40):
    """q, k and v of three sequences, each (stop, heads, dim)."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(stop, heads, dim) for heads, dim in ((4, 8), (2, 8), (2, 6))]
    return [[torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]] + [
        [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes] for _ in range(2)
    ]


# (sequences by their numbers at first, tokens that are dropped before, tokens of the step)
STEPS = [
    ((0, 1, 2), 0, 1),
    ((0, 1, 2), 0, 3),
    ((0, 1, 2), 2, 1),
    ((1, 0, 1, 2), 0, 2),
    ((1, 0, 1, 2), 0, 9),
    ((2,), 0, 1),
]


@few_rows()
@pytest.mark.parametrize("reserve", [0, 6])
@pytest.mark.parametrize("options", [{}, {"window_size": (3, 0)}, {"chunk": 4}], ids=str)
def test_sequences_grow_shrink_and_are_selected(options, reserve):
    sequences = of_several()

    def decode(comm):
        cache = ShardedCache(module("ring", comm), SEVERAL, block=2, reserve=reserve)
        prompts = [[x[:n] for x in of] for of, n in zip(sequences, LENGTHS, strict=True)]
        prefill = [torch.cat(x) for x in zip(*prompts, strict=True)]
        cache.put(0, *(SEVERAL.shard(x, comm.rank) for x in prefill[1:]))
        numbers, lengths, outs = [0, 1, 2], dict(enumerate(LENGTHS)), []
        for chosen, dropped, tokens in STEPS:
            cache.truncate(cache.length - dropped)
            cache.select([numbers.index(i) for i in chosen])
            numbers = list(chosen)
            lengths = {i: n - dropped + tokens for i, n in lengths.items()}
            cache.extend(tokens)
            rows = [[x[lengths[i] - tokens : lengths[i]] for x in sequences[i]] for i in chosen]
            outs.append(
                cache.attend(0, *(torch.cat(x) for x in zip(*rows, strict=True)), **options)
            )
        assert cache.layout.cu_seqlens.tolist() == [0, lengths[2]] and cache.sequences == 1
        return outs

    lengths = dict(enumerate(LENGTHS))
    results = virtual(3, decode)
    for step, (chosen, dropped, tokens) in enumerate(STEPS):
        lengths = {i: n - dropped + tokens for i, n in lengths.items()}
        right = torch.cat([alone(sequences[i], lengths[i], tokens, **options) for i in chosen])
        for outs in results:
            assert torch.equal(outs[step], results[0][step])
            torch.testing.assert_close(outs[step], right, rtol=0, atol=1e-12)


def alone(tensors, stop, tokens, chunk=None, **options):
    """Attention of the last tokens of one sequence, token by token."""
    outs = []
    for last in range(stop - tokens + 1, stop + 1):
        first = 0 if chunk is None else (last - 1) // chunk * chunk
        outs.append(expected([x[first:] for x in tensors], last - first, 1, options))
    return torch.cat(outs)


WINDOW, LONG = 5, 3 * (5 + SPARE)


def windowed(window, several):
    """What a rank gets in many steps, and the most rows that it had."""
    lengths = (0, 40, 90) if several else (0, 40)
    layout = Layout.zigzag(list(lengths), 3)
    count = len(lengths) - 1
    generator = torch.Generator().manual_seed(4)
    new = torch.randn(3, LONG * count, 2, 8, dtype=torch.float64, generator=generator)
    prompt = torch.randn(2, lengths[-1], 2, 8, dtype=torch.float64, generator=generator)

    def decode(comm):
        cache = ShardedCache(module("ring", comm), layout, block=3, window=window)
        cache.put(0, *(layout.shard(x, comm.rank) for x in prompt))
        outs, rows, at = [], 0, 0
        while at < LONG:
            tokens = 1 + at % 8
            cache.extend(tokens)
            part = new[:, at * count : (at + tokens) * count]
            if part.shape[1] < tokens * count:
                break
            outs.append(cache.attend(0, *part, window_size=(WINDOW, 0)))
            at += tokens
            if at % 3 == 0:  # tokens that were not accepted
                cache.truncate(cache.length - tokens)
            if at % 5 == 0:
                cache.select(list(range(count))[::-1])
            rows = max(rows, sum(cache.layout.tokens_per_rank))
        return outs, rows

    return virtual(3, decode)


@pytest.mark.parametrize("several", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_windowed_cache_answers_equally_within_bounded_memory(several):
    """Though steps are dropped again, and sequences of other lengths change places."""
    bounded, whole = windowed(WINDOW, several), windowed(None, several)
    for (outs, rows), (expected, all_rows) in zip(bounded, whole, strict=True):
        for out, right in zip(outs, expected, strict=True):
            torch.testing.assert_close(out, right, rtol=0, atol=1e-12)
        assert rows <= (1 + several) * (2 * (WINDOW + SPARE) + 8) < all_rows


def attend_in(window_size):
    return lambda cache, x: cache.attend(0, x, x, x, window_size=window_size)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda cache, x: cache.attend(0, x, x, x),
            "at most the cache's window, 5 keys .* got no limit",
        ),
        (attend_in((WINDOW + 1, 0)), "at most the cache's window, 5 keys before a query, got 6"),
        (lambda cache, x: cache.attend(0, x, x, x, chunk=4), "chunk must be None"),
        (
            lambda cache, x: cache.attend(0, x, x, x, window_size=(WINDOW, 0), prefix_lens=[3]),
            "prefix_lens must be None in a cache with a window",
        ),
        (lambda cache, x: cache.truncate(WINDOW - 1), "length must be at least 5"),
    ],
)
def test_a_window_of_a_cache_is_kept_to(call, message):
    def refused(comm):
        cache = ShardedCache(module("ring", comm), Layout.zigzag(200, 2), window=WINDOW)
        k = torch.zeros(100, 2, 4)
        cache.put(0, k, k)
        cache.extend()
        x = torch.zeros(1, 2, 4)
        with pytest.raises(ValueError, match=message):
            call(cache, x)
        attend_in((3, 0))(cache, x)
        return cache.length

    assert virtual(2, refused) == [WINDOW + SPARE + 1] * 2
