"""Ranks to test on: real processes with gloo, or virtual ranks, which are threads."""

import collections
import concurrent.futures
import contextlib
import functools
import gc
import os
import tempfile
import threading
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from seqpar import use_backend
from seqpar.attention.backend import DEFAULT, current_backend
from seqpar.comm.messages.comm import Comm, Pending
from seqpar.core.hooks import with_hooks
from tests.support.processes import PROCESSES

# Seconds that a collective may take. On a GPU, kernels may have to be compiled.
_TIMEOUT = 400.0 if torch.cuda.is_available() else 60.0
_ANSWER_SECONDS = 4 * _TIMEOUT  # for a call on the pool; other programs may delay it


def _serve(rank, ranks, store_file, pipe, timeout):
    """Be a rank of the pool: run each call that the pipe delivers, until it delivers None."""
    torch.set_num_threads(1)
    store = dist.FileStore(store_file, ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=_TIMEOUT)
    )
    groups = {
        size: dist.new_group(list(range(size)), timedelta(seconds=timeout))
        for size in range(1, ranks + 1)
    }
    kept = {dist.group.WORLD, *groups.values()}
    world = dist.distributed_c10d._world
    pipe.send(world.group_count)
    while (asked := pipe.recv()) is not None:
        size, function, arguments = asked
        _destroy_groups_except(kept)
        try:
            pipe.send((("result", function(groups[size], *arguments)), world.group_count))
        except BaseException as error:
            # Other processes cannot import the types of some errors, such as those of pytest.
            found = type(error) if isinstance(error, Exception) else RuntimeError
            answer = "error", (found, str(error), traceback.format_exc())
            pipe.send((answer, world.group_count))
    dist.destroy_process_group()


def _destroy_groups_except(kept, meshes=False):
    """Destroy the groups of earlier calls, which all ranks have finished.

    Each group has a heartbeat, and a thread of gloo that wakes up 100 times a second. Groups of
    meshes are kept: DTensor reuses its plans for equal meshes, and the plans name the groups.
    """
    for group in set(dist.distributed_c10d._world.pg_map) - kept:
        if meshes or not group.group_desc.startswith("mesh_"):
            dist.destroy_process_group(group)


@contextlib.contextmanager
def groups_end(group):
    """Destroy all groups made in this context, including groups of meshes without DTensors."""
    kept = set(dist.distributed_c10d._world.pg_map)
    yield
    dist.barrier(group)
    _destroy_groups_except(kept, meshes=True)


def hide_from_collector(group):
    """Drop compiled code, and hide imported modules from the garbage collector.

    Trainers request collections, which would take a quarter of the time of their tests.
    """
    torch.compiler.reset()
    gc.collect()
    gc.freeze()


@functools.cache
def device_mesh(*shape, names=None):
    """Return the mesh of this shape on the pool's processes. It is made once, with its groups."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


class Pool:
    """Processes that stay alive, so that a property test can run many calls.

    A call that fails or hangs restarts the processes.
    """

    def __init__(self, ranks, timeout=_TIMEOUT / 2):
        """Start no processes yet; `timeout` is the timeout of the groups, in seconds."""
        self.ranks, self._timeout = ranks, timeout
        self._processes, self._pipes, self._made = [], [], []

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.ranks):
            ours, theirs = PROCESSES.Pipe()
            arguments = (rank, self.ranks, f"{self._folder.name}/store", theirs, self._timeout)
            process = PROCESSES.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(_ANSWER_SECONDS):
                raise TimeoutError(f"rank {rank} did not begin")
            self._made.append(pipe.recv())
        return self

    def __exit__(self, *_):
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()
        self._processes, self._pipes, self._made = [], [], []

    def each(self, ranks, function, *arguments):
        """Return the answer of each rank: ("result", value) or ("error", (type, message,
        traceback)).

        Raises an AssertionError if the function made a group on only some of the pool's processes.
        torch names a group by the number of groups that its process has made. The next group would
        have different names on different processes, which would then wait for each other.
        """
        for pipe in self._pipes[:ranks]:
            pipe.send((ranks, function, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes[:ranks]):
            if not pipe.poll(_ANSWER_SECONDS):
                self.restart()
                raise TimeoutError(f"rank {rank} of {ranks} did not answer; others said {answers}")
            answer, self._made[rank] = pipe.recv()
            answers.append(answer)
        made = self._made
        if len(set(made)) > 1:
            self.restart()
            if all(kind == "result" for kind, _ in answers):
                raise AssertionError(f"{function} must make groups on all processes, made {made}")
        return answers

    def leave(self):
        """Let all ranks end by themselves; return their exit codes, None for a rank that does not
        end."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(_TIMEOUT / 2)
        return [process.exitcode for process in self._processes]

    def restart(self):
        self.__exit__()
        self.__enter__()

    def __call__(self, ranks, function, *arguments):
        """Return the ranks' results, in order, or raise the error of the first rank that failed."""
        answers = self.each(ranks, function, *arguments)
        for rank, (kind, value) in enumerate(answers):
            if kind == "error":
                self.restart()
                raise AssertionError(f"rank {rank} of {ranks}: {value[2]}")
        return [value for _, value in answers]


class Mail:
    """Messages to one virtual rank that it has not received yet."""

    def __init__(self):
        self.messages, self.changed = {}, threading.Condition()


class VirtualComm(Comm):
    """A virtual rank: one of several threads in one process. They share `mail`, a list by rank."""

    def __init__(self, name, rank, size, mail):
        super().__init__(name, rank, size)
        self._mail, self._counts = mail, collections.Counter()

    def settle(self, tensor):
        """Wait for the current stream, since a rank may send on one stream and receive on another.

        Returns the event for which the receiver's stream waits, or None on a CPU.
        """
        if not tensor.is_cuda:
            return None
        event = torch.cuda.current_stream().record_event()
        event.synchronize()  # sync debug mode allows it
        return event

    def start(self, sends, recvs, exchange):
        for peer, tensor in sends:
            key = self.rank, exchange.hop, self._counts["sent", peer, exchange.hop]
            message = exchange, tensor.clone(), self.settle(tensor)
            self._counts["sent", peer, exchange.hop] += 1
            with self._mail[peer].changed:
                self._mail[peer].messages[key] = message
                self._mail[peer].changed.notify_all()
        tickets = []
        for peer, tensor in recvs:
            count = self._counts["posted", peer, exchange.hop]
            tickets.append(((peer, exchange.hop, count), tensor))
            self._counts["posted", peer, exchange.hop] += 1
        return _VirtualPending(self, self._mail[self.rank], tickets, exchange)


class _VirtualPending(Pending):
    def __init__(self, comm, mail, tickets, exchange):
        super().__init__([], [])
        self._comm, self._mail, self._tickets, self._exchange = comm, mail, tickets, exchange

    def wait(self):
        for ticket, tensor in self._tickets:
            with self._mail.changed:
                assert self._mail.changed.wait_for(
                    lambda key=ticket: key in self._mail.messages, _TIMEOUT
                ), ticket
                exchange, message, sent = self._mail.messages.pop(ticket)
            assert exchange == self._exchange
            assert message.shape == tensor.shape and message.dtype == tensor.dtype
            if sent is not None:
                torch.cuda.current_stream().wait_event(sent)
                message.record_stream(torch.cuda.current_stream())
            tensor.copy_(message)
            self._comm.settle(tensor)
        self._tickets = []


_worlds = iter(range(10**9))


def threads_of_a_core(count):
    """Return an executor with `count` threads, which share one core.

    Each pytest worker uses a different core. The threads hold the interpreter's lock most of the
    time. When they ran on several cores, passing the lock took a quarter of their CPU time.
    """
    cores = sorted(os.sched_getaffinity(0))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    core = {cores[worker % len(cores)]}
    return concurrent.futures.ThreadPoolExecutor(
        count, initializer=os.sched_setaffinity, initargs=(0, core)
    )


def as_here(function):
    """Return a function without arguments that a different thread can call.

    It calls `function` with the hooks and the backend of the thread that called `as_here`.
    """
    name = current_backend("recurrent")

    def run():
        with contextlib.nullcontext() if name == DEFAULT else use_backend(name):
            return function()

    return with_hooks(run)


def virtual(ranks, function, *arguments, make_comm=VirtualComm):
    """Run function(comm, *arguments) on all virtual ranks at once; return the results in order."""

    def on_its_thread(comm):
        # With multithreading, all backwards on a GPU would run in one thread and block each other.
        with torch.autograd.set_multithreading_enabled(False):
            return function(comm, *arguments)

    mail, world = [Mail() for _ in range(ranks)], next(_worlds)
    with threads_of_a_core(ranks) as threads:
        comms = [make_comm(f"virtual{world}.{rank}", rank, ranks, mail) for rank in range(ranks)]
        played = [as_here(functools.partial(on_its_thread, comm)) for comm in comms]
        futures = [threads.submit(play) for play in played]
        return [future.result(_TIMEOUT) for future in futures]
