"""ServerCache: decoding on servers in threads, against one device and whatever happens to them."""

import contextlib
import copy
import gc
import math
import multiprocessing
import pickle
import threading
import time

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import seqpar
from seqpar import Layout, ServerCache, ServersError
from seqpar.servers.cache import layer_cache
from seqpar.servers.pool.dispatcher import StepLostError
from seqpar.servers.server import caches, worker
from seqpar.servers.server.caches import CacheStep
from seqpar.servers.server.sessions import FullError, Session
from seqpar.servers.transport.one_sided import available
from seqpar.servers.wire.limits import Limits
from tests.support import special_values
from tests.support.cases import module
from tests.support.fakes import fake_group
from tests.support.ranks import virtual
from tests.support.server_caches import (
    LAYERS,
    OPTIONS,
    PREFILL,
    QUICK,
    STEPS,
    decode,
    drawn,
    nobody,
    part,
    prefilled,
    same_bits,
    undisturbed,
)
from tests.support.servers import connect, running, wait_until
from tests.support.tiers import few_rows

EXHAUSTIVE = pytest.mark.exhaustive
TENSORS = drawn()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(f"ipc://{tmp_path_factory.mktemp('server')}/s") as server:
        yield server


@pytest.fixture(scope="module")
def pool(server):
    with connect(server.address, home=False) as pool:
        yield pool


@pytest.fixture
def addresses(tmp_path):
    return [f"ipc://{tmp_path}/{i}" for i in range(2)]


def expected(x, stop, tokens, options):
    """Attention of a sequence's last tokens, by a module on one rank, in fp64."""
    q, k, v = (y.double() for y in part(x, 0, stop))
    q = q[..., stop - tokens :, :, :]
    options = {"causal": True} | {
        name: y.double() if isinstance(y, torch.Tensor) else y for name, y in options.items()
    }
    layouts = Layout.contiguous(tokens, 1), Layout.contiguous(stop, 1)
    call = lambda comm: module("ring", comm)(  # noqa: E731
        q, k, v, layouts[0], kv_layout=layouts[1], return_lse=True, **options
    )
    return virtual(1, call)[0]


def cases():
    """Options, batch, dtype and segment of the steps that are compared; some in `make test-all`."""
    for i, case in enumerate((
        ("plain", (2,), torch.float32), ("window", (), torch.float32),
        ("sinks and softcap", (1,), torch.float64), ("full", (2,), torch.bfloat16),
        ("sinks and softcap", (), torch.bfloat16), ("window", (3,), torch.float16),
    )):  # fmt: skip
        for j, segment in enumerate((None, 8)):
            yield pytest.param(*case, segment, marks=[EXHAUSTIVE] if (i + j) % 2 else [])


@pytest.mark.parametrize(("name", "batch", "dtype", "segment"), list(cases()))
def test_steps_equal_one_device(pool, tmp_path, name, batch, dtype, segment):
    tensors, options = drawn(batch=batch, dtype=dtype), OPTIONS[name]
    cache = prefilled(pool, tensors, segment=segment)
    stops = []
    found = decode(cache, tensors, lambda i: stops.append(cache.length), **options)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    results = iter(found)
    for stop, tokens in zip(stops, STEPS, strict=True):
        for layer in LAYERS:
            wanted = expected(tensors[layer], stop + tokens, tokens, options)
            for x, y in zip((next(results), next(results)), wanted, strict=True):
                assert x.shape == y.shape
                torch.testing.assert_close(x.double(), y, atol=tolerance, rtol=tolerance)
    assert found[0].dtype == dtype
    assert same_bits(found, undisturbed(tmp_path, tensors, segment, **options))
    cache.close()


@pytest.mark.parametrize("place", ["q", "k", "v", "sinks"])
def test_nan_and_infinities_are_those_of_one_device(pool, place):
    """The value is in the prefill, then in a step; a dropped token leaves none behind."""
    for value, number in special_values.VALUES.items():
        infinite = place == "v" and value != "NaN"
        rules = {"out": special_values.NOT_FINITE} if infinite else {"out": special_values.EQUAL}
        for tokens, prefill in ((9, 6), (17, 5)):
            drawn = special_values.inputs(tokens, place, number)
            right = special_values.expected(drawn, {"causal": True}, True)[:2]
            found, k, v = [], drawn["k"], drawn["v"]
            with ServerCache(pool, prefill, segment=4) as cache:
                cache.put(0, k[:prefill], v[:prefill])
                cache.extend()
                cache.attend(0, k[:1], k[:1] * math.nan, v[:1] * math.inf)
                cache.truncate(prefill)
                for i in range(prefill, tokens):
                    cache.extend()
                    new = (drawn[x][i : i + 1] for x in "qkv")
                    found.append(cache.attend(0, *new, sinks=drawn["sinks"], return_lse=True))
            results = [torch.cat(x) for x in zip(*found, strict=True)]
            of_steps = [x[prefill:] for x in right]
            special_values.assert_alike(
                results, of_steps, torch.float32, rules | {"lse": special_values.EQUAL}
            )


@pytest.mark.parametrize("has_server", [True, False])
def test_posted_tensors_may_change(pool, tmp_path, has_server):
    tensors, found = drawn(PREFILL + 1), []
    with nobody(tmp_path) as own_pool:
        for changes in (False, True):
            with prefilled(pool if has_server else own_pool, tensors) as cache:
                cache.extend()
                new = [x.clone() for x in part(tensors[1], PREFILL, PREFILL + 1)]
                sinks = torch.zeros(4)
                answer = cache.post(1, *new, sinks=sinks)
                for x in (*new, sinks) if changes else ():
                    x.fill_(9)
                found.append(answer.result())
    assert torch.equal(*found)


@pytest.mark.parametrize("rebuilds", [False, True])
def test_the_default_device_changes_nothing(pool, tmp_path, rebuilds):
    rebuild = lambda layer, start, stop: tuple(part(TENSORS[layer], start, stop)[1:])  # noqa: E731
    wanted = undisturbed(tmp_path, TENSORS)
    with nobody(tmp_path) as own_pool, torch.device("meta"):
        for each in (pool, own_pool):
            with prefilled(each, TENSORS, rebuild=rebuild if rebuilds else None) as cache:
                assert same_bits(decode(cache, TENSORS), wanted)


def test_bytes_per_step_do_not_depend_on_length(server, pool):
    def settled():
        """The bytes that the server has counted once it has answered all."""
        time.sleep(0.1)
        return server.totals.bytes

    tokens, sizes = 2, []
    for length in (10, 5000):
        tensors = drawn(length + tokens)
        with prefilled(pool, tensors, length) as cache:
            cache.extend(tokens)
            before, done = settled(), server.totals.tasks
            cache.attend("first", *part(tensors["first"], length, length + tokens))
            wait_until(lambda: server.totals.tasks > done)  # noqa: B023
            sizes.append(settled() - before)
    there, back = 2 * tokens * (4 * 8 + 2 * (8 + 6)) * 4, 2 * tokens * 4 * (6 + 1) * 4
    assert sizes == [there + back] * 2 and there % 64 == back % 64 == 0


def test_caches_use_the_emptiest_server_and_are_freed(addresses):
    limits = Limits(cache_bytes=2**20), Limits(cache_bytes=2**21)
    with (
        running(addresses[0], limits=limits[0]) as small,
        running(addresses[1], limits=limits[1]) as large,
        connect(*addresses, home=False) as pool,
    ):
        wait_until(lambda: [x.state for x in pool.report().servers[:2]] == ["ready"] * 2)
        kept = [prefilled(pool, TENSORS) for _ in range(20)]
        counts = [server.status().caches for server in (small, large)]
        assert sum(counts) == 40 and 8 <= counts[0] < counts[1]
        held = {address: sum(x.held.get(address, 0) for x in kept) for address in addresses}
        assert all(
            server.status().cache_bytes == held[address] + 4096 * count
            for address, server, count in zip(addresses, (small, large), counts, strict=True)
        )
        kept[0].close()
        kept[0].close()
        del kept[1:]
        gc.collect()
        wait_until(lambda: small.status().caches + large.status().caches == 0)
        assert small.status().cache_bytes == large.status().cache_bytes == 0


def test_a_full_server_leaves_caches_to_others(addresses, tmp_path):
    wanted = undisturbed(tmp_path, TENSORS)
    page = 2 * 256 * 2 * 14 * 4 + 4096
    with (
        running(addresses[0], limits=Limits(cache_bytes=page + 1)) as server,
        connect(addresses[0]) as pool,
        prefilled(pool, TENSORS) as cache,
    ):
        assert same_bits(decode(cache, TENSORS), wanted)
        assert server.status().caches == 1
        wait_until(lambda: pool.report().servers[-1].tasks == len(STEPS))
        with running(addresses[1]) as other:
            pool._dispatcher.serve_at(addresses)
            wait_until(lambda: pool.report().servers[1].state == "ready")
            tensors = {name: [x.roll(5, 1) for x in y] for name, y in TENSORS.items()}
            with prefilled(pool, tensors) as second:
                decode(second, tensors)
                assert other.status().caches == 2


class Once:
    """Does something in place of a function, the first few times."""

    def __init__(self, monkeypatch, owner, name, action, times=1):
        self.function, self.action, self.left = getattr(owner, name), action, times
        monkeypatch.setattr(owner, name, lambda *x, **options: self(*x, **options))

    def __call__(self, *arguments, **options):
        if self.left > 0:
            self.left -= 1
            return self.action(*arguments, **options)
        return self.function(*arguments, **options)


def fails(*_, **__):
    raise RuntimeError("no data of anybody's")


def full(*_):
    raise FullError("requests: there are too many")


def altered(**changes):
    """Lets the server have something else than it is told, or nothing."""

    def action(store, client, *arguments, **options):
        for cache in store._caches[client].values():
            for name, value in changes.items():
                setattr(cache, name, value)
        if not changes:
            store.end(client)
        return Caches_admit(store, client, *arguments, **options)

    return action


Caches_admit = caches.Caches.admit
FAULTS = {
    "evicted": lambda patch: Once(patch, caches.Caches, "admit", altered()),
    "other length": lambda patch: Once(patch, caches.Caches, "admit", altered(length=3)),
    "other writes": lambda patch: Once(patch, caches.Caches, "admit", altered(writes=99)),
    "not computed": lambda patch: Once(patch, caches.Caches, "admit", altered(done=0)),
    "damaged answer": lambda patch: Once(patch, worker, "checksum", lambda parts: 1),
    "short answer": lambda patch: Once(
        patch, CacheStep, "compute", lambda step: [torch.zeros(3), torch.zeros(1)]
    ),
    "computation fails": lambda patch: Once(patch, CacheStep, "compute", fails),
    "no memory": lambda patch: Once(patch, caches.Caches, "admit", fails),
    "busy": lambda patch: Once(patch, Session, "request", full, 5),
}


@few_rows()
@pytest.mark.parametrize("home", [True, pytest.param(False, marks=EXHAUSTIVE)])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_lost_is_noticed_and_built_again(addresses, tmp_path, monkeypatch, fault, home):
    wanted = undisturbed(tmp_path, TENSORS)
    with running(addresses[0]), running(addresses[1]), connect(*addresses, home=home) as pool:
        wait_until(lambda: [x.state for x in pool.report().servers[:2]] == ["ready"] * 2)
        with prefilled(pool, TENSORS) as cache:
            begun = []

            def between(i):
                if i == 3:
                    begun.append(FAULTS[fault](monkeypatch))

            assert same_bits(decode(cache, TENSORS, between), wanted)
            assert not begun[0].left
            assert pool.report().retried
            wait_until(lambda: pool.report().waiting == 0)
            assert sum(x.tasks for x in pool.report().servers[:2]) > 2 * 3  # after the fault too


def test_a_hanging_server_is_given_up_in_time(addresses, tmp_path, monkeypatch):
    wanted = undisturbed(tmp_path, TENSORS)
    with running(addresses[0]), connect(addresses[0], deadlines=QUICK) as pool:
        with prefilled(pool, TENSORS) as cache:

            def between(i):
                if i == 3:
                    compute = CacheStep.compute
                    Once(
                        monkeypatch,
                        CacheStep,
                        "compute",
                        lambda s: (time.sleep(1.5), compute(s))[1],
                    )

            start = time.monotonic()
            assert same_bits(decode(cache, TENSORS, between), wanted)
            assert QUICK["request"] < time.monotonic() - start
            wait_until(lambda: pool.report().servers[-1].tasks)
        wait_until(lambda: pool.report().waiting == 0)


@pytest.mark.parametrize("segment", [pytest.param(None, marks=EXHAUSTIVE), 8])
def test_a_server_that_leaves_and_comes_back(addresses, tmp_path, segment):
    wanted = undisturbed(tmp_path, TENSORS, segment)
    with connect(*addresses, deadlines=QUICK | {"request": 5.0}) as pool:
        servers = [running(address) for address in addresses]
        servers[0].__enter__()
        wait_until(lambda: pool.report().servers[0].state == "ready")
        with prefilled(pool, TENSORS, segment=segment) as cache:

            def between(i):
                if i == 2:  # drains, and nobody is left
                    servers[0].__exit__(None, None, None)
                if i == 4:  # another one, and the address of the first again
                    servers[1].__enter__()
                    servers[0] = running(addresses[0])
                    servers[0].__enter__()
                    states = ["ready"] * 2
                    wait_until(lambda: [x.state for x in pool.report().servers[:2]] == states)
                if i == 6:
                    servers[1].__exit__(None, None, None)

            assert same_bits(decode(cache, TENSORS, between), wanted)
            assert addresses[1] not in cache.held
            wait_until(lambda: pool.report().servers[-1].tasks)
        servers[0].__exit__(None, None, None)


@pytest.mark.parametrize(
    "transport",
    ["grpc", pytest.param("nixl", marks=pytest.mark.skipif(not available(), reason="needs nixl"))],
)
def test_steps_of_several_caches_go_on_at_once(addresses, transport):
    transports = [transport, "grpc"]
    with (
        running(addresses[0], transports=transports),
        connect(addresses[0], transports=transports, home=False) as pool,
    ):
        many = [drawn(PREFILL + i + 1, seed=i) for i in range(6)]
        several = [prefilled(pool, x, PREFILL + i) for i, x in enumerate(many)]
        for layer in LAYERS:
            news = [part(x[layer], PREFILL + i, PREFILL + i + 1) for i, x in enumerate(many)]
            if layer == LAYERS[0]:
                for cache in several:
                    cache.extend()
            posted = [cache.post(layer, *new) for cache, new in zip(several, news, strict=True)]
            for i, (x, answer) in enumerate(zip(many, posted, strict=True)):
                out, _ = expected(x[layer], PREFILL + i + 1, 1, {})
                torch.testing.assert_close(answer.result().double(), out, atol=1e-5, rtol=1e-5)


def test_rows_that_are_many_are_sent_in_parts(addresses):
    limits = Limits(tokens=128, bytes=2**14)
    tensors = drawn(1001)
    with (
        running(addresses[0], limits=limits) as server,
        connect(addresses[0], home=False) as pool,
        prefilled(pool, tensors, 1000) as cache,
    ):
        assert server.totals.tasks >= 2 * 1000 / 64
        cache.extend()
        out = cache.attend("first", *part(tensors["first"], 1000, 1001))
        wanted, _ = expected(tensors["first"], 1001, 1, {})
        torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


def wrong(**changes):
    """A step with something wrong in it."""
    q, k, v = part(TENSORS["first"], PREFILL, PREFILL + 2)
    arguments = {"layer": "first", "q": q, "k": k, "v": v} | changes
    return lambda cache: cache.attend(**arguments)


Q, K, V = part(TENSORS["first"], PREFILL, PREFILL + 2)
REFUSALS = {
    "layer must be one that put has stored": wrong(layer="third"),
    "q must have the 2 tokens": wrong(q=Q[:, :1]),
    "k must have the 2 tokens": wrong(k=K[:, :1]),
    "q must be a tensor": wrong(q=[1.0]),
    "q must have 4 dimensions": wrong(q=Q[0], k=K[0], v=V[0]),
    "v must be": wrong(v=V[0]),
    "k and v must be like": wrong(q=Q[:1], k=K[:1], v=V[:1]),
    "k must be of q's dtype": wrong(k=K.double()),
    "k and v must be like those": wrong(q=Q.double(), k=K.double(), v=V.double()),
    "k must have q's head dim": wrong(k=K[..., :3]),
    "q must have a multiple of k's": wrong(q=Q[:, :, :3]),
    "q must require no gradient": wrong(q=Q.clone().requires_grad_()),
    "causal must be": wrong(causal="yes"),
    "window_size must be": wrong(window_size=3),
    "softmax_scale must be": wrong(softmax_scale=float("inf")),
    "softcap must be": wrong(softcap=-1.0),
    "sinks must be": wrong(sinks=torch.zeros(3)),
    "return_lse must be": wrong(return_lse="no"),
    "must attend once in each step": lambda cache: (wrong()(cache), wrong()(cache)),
    "tokens must be": lambda cache: cache.extend(0),
    "length must be": lambda cache: cache.truncate(PREFILL + 9),
    "k must have the 23 tokens": lambda cache: cache.put("first", K, V),
    "has an answer already": lambda cache: (cache.post("first", Q, K, V), cache.extend())[0],
    "an answer already": lambda cache: [cache.post("first", Q, K, V), cache.truncate(0)],
    "was closed": lambda cache: (cache.close(), cache.extend()),
}


@pytest.mark.parametrize("said", REFUSALS)
def test_what_is_wrong_is_refused_by_name(pool, server, said):
    with prefilled(pool, TENSORS) as cache:
        cache.extend(2)
        before = cache.length
        with pytest.raises(ValueError, match=said):
            REFUSALS[said](cache)
        assert cache.length == before


def test_other_backends_pools_and_shapes_are_refused(pool, tmp_path):
    with prefilled(pool, TENSORS) as cache:
        cache.extend(2)
        with seqpar.use_backend("reference"), pytest.raises(ValueError, match="backend must be"):
            wrong()(cache)
        wrong()(cache)
    for arguments, said in (
        ((None,), "pool must be"), ((pool, -1), "length must be"), ((pool, 2.5), "length must be"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            ServerCache(*arguments)
    with pytest.raises(ValueError, match="segment must be"):
        ServerCache(pool, segment=0)
    for k, said in (
        (torch.zeros(3, 2000, 4), "k must have 1 to 1024 heads"),
        (torch.zeros(3, 2, 2000), "k must have a head dim of 1 to 1024"),
        (torch.zeros(0, 3, 2, 4), "batch size of 1"),
        (torch.zeros(3, 2, 4, dtype=torch.int32), "k must have one of the dtypes"),
        (torch.zeros(3, 2, 4, device="meta"), "k must have .* not be on the meta device"),
        (torch.zeros(3, 0, 4), "at least one head"),
    ):
        with ServerCache(pool, 3) as cache, pytest.raises(ValueError, match=said):
            cache.put(0, k, k)
    with nobody(tmp_path, sample=2) as sampled, pytest.raises(ValueError, match="sample=0"):
        ServerCache(sampled)


def test_an_answer_is_returned_once(pool):
    with prefilled(pool, TENSORS) as cache:
        cache.extend(2)
        answer = cache.post("first", Q, K, V)
        answer.result()
        with pytest.raises(ValueError, match="before"):
            answer.result()


def test_an_answer_that_is_not_wanted_is_dropped(tmp_path):
    wanted = undisturbed(tmp_path, TENSORS)
    with (
        running(f"ipc://{tmp_path}/own") as server,
        connect(server.address) as pool,
        prefilled(pool, TENSORS) as cache,
    ):

        def between(i):
            if i == 3:
                cache.extend(2)
                cache.post("first", Q + 1, K + 1, V + 1)
                cache.truncate(cache.length - 2)

        assert same_bits(decode(cache, TENSORS, between), wanted)
        wait_until(lambda: server.status().caches == len(TENSORS))


def test_empty_sequences_may_begin_with_a_step(pool):
    tensors = drawn(9)
    with prefilled(pool, tensors, 0) as cache:
        assert cache.held == {} and cache.length == 0
        cache.extend(9)
        out = cache.attend("first", *tensors["first"])
        wanted, _ = expected(tensors["first"], 9, 9, {})
        torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
        cache.truncate(0)
        cache.extend(9)
        assert cache.attend("first", *tensors["first"]).equal(out)
        cache.put("first", *tensors["first"][1:])  # in place of what was there
        cache.truncate(8)
        cache.extend()
        last = cache.attend("first", *part(tensors["first"], 8, 9))
        torch.testing.assert_close(last, out[:, 8:])


def test_a_step_without_servers_raises_and_can_restart(addresses):
    deadlines = {"connect": 0.1, "request": 0.2, "hedge": 0.3, "give_up": 0.5}
    with connect(addresses[0], home=False, deadlines=deadlines) as pool:
        cache, start = ServerCache(pool, 2), time.monotonic()
        with pytest.raises(ServersError, match="no ready server has enough free memory"):
            cache.put("first", *part(TENSORS["first"], 0, 2)[1:])
        assert time.monotonic() - start < 5
        cache.extend()
        with pytest.raises(ServersError):
            cache.attend("first", *part(TENSORS["first"], 2, 3))
        found = []

        def begun_again():
            """Whether the step has a result now; a machine under load may be late again."""
            cache.truncate(2)
            cache.extend()
            with contextlib.suppress(ServersError):
                found.append(cache.attend("first", *part(TENSORS["first"], 2, 3)))
            return found

        with running(addresses[0]):
            wait_until(begun_again)
        wanted, _ = expected(TENSORS["first"], 3, 1, {})
        torch.testing.assert_close(found[0].double(), wanted, atol=1e-5, rtol=1e-5)


def test_closing_the_pool_during_a_step_raises(addresses, monkeypatch):
    with running(addresses[0]), connect(addresses[0]) as pool:
        cache = prefilled(pool, TENSORS)
        cache.extend(2)
        closed = threading.Event()
        Once(monkeypatch, CacheStep, "compute", lambda step: closed.wait(20))
        answer = cache.post("first", Q, K, V)
        pool.close()
        with pytest.raises(ServersError, match="closed"):
            answer.result()
        closed.set()
        with pytest.raises(ServersError, match="closed"):
            cache.attend(1, Q, K, V)
        cache.close()
        with pytest.raises(ServersError, match="closed"):
            prefilled(pool, TENSORS)


def test_closing_a_cache_early_frees_its_memory(addresses, monkeypatch):
    with running(addresses[0]) as server, connect(addresses[0]) as pool:
        cache = prefilled(pool, TENSORS)
        cache.extend(2)
        compute = CacheStep.compute
        Once(monkeypatch, CacheStep, "compute", lambda s: (time.sleep(0.3), compute(s))[1])
        answer = cache.post("first", Q, K, V)
        cache.close()
        del answer
        wait_until(lambda: server.status().caches == 0 and pool.report().waiting == 0)


def lost(segment, begun):
    raise StepLostError("the server has lost it", blame=False)


@pytest.mark.parametrize("home", [True, False])
def test_no_server_keeps_a_closed_caches_lost_step(addresses, monkeypatch, home):
    with (
        running(addresses[0]),
        running(addresses[1]) as other,
        connect(*addresses[:2], home=home) as pool,
    ):
        cache = prefilled(pool, TENSORS)
        cache.extend(2)
        answer = cache.post("first", Q, K, V)
        cache.close()
        monkeypatch.setattr(layer_cache.Segment, "_answer", lost)
        quiet = contextlib.nullcontext()
        with quiet if home else pytest.raises(ServersError, match="was closed"):
            answer.result()
        wait_until(lambda: other.status().caches == 0)


def in_a_fork(cache, queue):
    _, k, v = part(TENSORS["first"], 0, PREFILL + 2)
    for call in (wrong(), lambda cache: cache.put("new", k, v)):
        try:
            call(cache)
        except ServersError as error:
            queue.put(str(error))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_is_refused(pool):
    fork = multiprocessing.get_context("fork")
    with prefilled(pool, TENSORS) as cache:
        cache.extend(2)
        queue = fork.SimpleQueue()
        child = fork.Process(target=in_a_fork, args=(cache, queue), daemon=True)
        child.start()
        child.join(20)
        for _ in range(2):
            assert not queue.empty() and "made by a different process" in queue.get()
        wrong()(cache)


def test_inference_mode_and_strided_memory_work(pool, tmp_path):
    wanted = undisturbed(tmp_path, TENSORS)
    apart = {layer: [x.mT.contiguous().mT for x in y] for layer, y in TENSORS.items()}
    with prefilled(pool, apart) as cache, torch.inference_mode():
        assert same_bits(decode(cache, apart), wanted)
    with torch.inference_mode():
        cache = prefilled(pool, TENSORS)
    assert same_bits(decode(cache, TENSORS), wanted)
    cache.close()
    with prefilled(pool, TENSORS) as cache, torch.autocast("cpu", torch.bfloat16):
        cache.extend(2)
        with pytest.raises(ValueError, match="k and v must be like those at put"):
            wrong()(cache)  # it was put without autocast


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
def test_a_cache_is_not_copied(pool, how):
    with prefilled(pool, TENSORS) as cache, pytest.raises(TypeError, match="neither copied nor"):
        how(cache)


def test_an_interrupted_step_is_not_counted_as_done(pool, tmp_path, monkeypatch):
    wanted = undisturbed(tmp_path, TENSORS)

    def interrupted(*_):
        raise KeyboardInterrupt

    with prefilled(pool, TENSORS) as cache:

        def between(i):
            if i == 3:
                cache.extend(2)
                Once(monkeypatch, layer_cache, "received", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    wrong(q=Q + 1, k=K + 1, v=V + 1)(cache)
                cache.truncate(cache.length - 2)

        assert same_bits(decode(cache, TENSORS, between), wanted)


def test_heads_may_be_sharded_by_dtensors(pool):
    with fake_group(1, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

        def sharded(x):
            return DTensor.from_local(x, mesh, [Shard(x.dim() - 2)], run_check=False)

        with prefilled(pool, {}) as cache, prefilled(pool, TENSORS) as plain:
            cache.put("first", *map(sharded, part(TENSORS["first"], 0, PREFILL)[1:]))
            for each in (cache, plain):
                each.extend(2)
            out, lse = cache.attend("first", *map(sharded, (Q, K, V)), return_lse=True)
            wanted = plain.attend("first", Q, K, V, return_lse=True)
            assert out.placements == (Shard(2),) and lse.placements == (Shard(2),)
            assert same_bits([out.to_local(), lse.to_local()], wanted)
            cache.extend(2)
            with pytest.raises(ValueError, match="k must be a DTensor like q"):
                cache.attend("first", sharded(Q), K, V)


@pytest.mark.parametrize(
    ("batch", "segment"), [((), 8), pytest.param((2,), None, marks=EXHAUSTIVE)]
)
def test_a_decoder_may_recompute_lost_rows(addresses, tmp_path, segment, batch):
    tensors, asked, done = drawn(batch=batch), [], {}
    wanted = undisturbed(tmp_path, tensors, segment)

    def rebuild(layer, start, stop):
        asked.append((start, stop))
        assert 0 <= start < stop <= done[layer], "of a step that is not done"
        return tuple(part(tensors[layer], start, stop)[1:])

    servers = [running(address) for address in addresses]
    servers[0].__enter__()
    with connect(addresses[0], deadlines=QUICK | {"request": 5.0}) as pool:
        cache = ServerCache(pool, PREFILL, segment=segment, rebuild=rebuild)
        for layer in LAYERS:
            cache.put(layer, *part(tensors[layer], 0, PREFILL)[1:])

        def between(i):
            done.update(dict.fromkeys(LAYERS, cache.length))
            if i == 3:
                assert not asked  # nothing was lost
                servers[0].__exit__(None, None, None)
            if i == 5:  # from home to a server
                assert asked
                servers[1].__enter__()
                pool._dispatcher.serve_at(addresses)
                wait_until(lambda: pool.report().servers[1].state == "ready")

        assert same_bits(decode(cache, tensors, between), wanted)
        assert set(cache.held) <= {addresses[1]}
        for layer in cache._layers.values():
            assert all(x._own_rows._recent is None for x in layer.segments)  # no copy is kept
        servers[1].__exit__(None, None, None)


@pytest.mark.parametrize(("found", "error"), [
    (None, "rebuild must return k and v"), ((K, K, K), "rebuild must return"),
    ((K.double(), V.double()), "rebuild must return"),
    ((K[:, :1], V[:, :1]), "rebuild must return"),
    (KeyError("not there"), "not there"),
])  # fmt: skip
def test_wrong_or_missing_recomputed_rows_raise(tmp_path, found, error):
    def rebuild(*_):
        if isinstance(found, Exception):
            raise found
        return found

    with nobody(tmp_path) as pool, ServerCache(pool, PREFILL, rebuild=rebuild) as cache:
        cache.put("first", *part(TENSORS["first"], 0, PREFILL)[1:])
        cache.extend(2)
        with pytest.raises((ValueError, KeyError), match=error):
            wrong()(cache)
        with pytest.raises(ValueError, match="rebuild must be a function"):
            ServerCache(pool, rebuild=3)
