"""A driver and its ranks, which are threads here: they answer, refuse, break, hang and end."""

import json
import socket
import threading

import pytest

from seqpar.bench.workers import ranks as module
from seqpar.bench.workers.ranks import PointError, RankProcesses, StartError, follow
from seqpar.comm.launch import LaunchedProcess, connect
from tests.support.faults import LIMIT


class Threads:
    """In the place of processes: ranks that do what their request says."""

    made = ()  # all of a test

    def __init__(self, mine, device, local):
        self.mine, self.said, self.begun, self.running = list(mine), None, [], []
        self.stopped = threading.Event()
        Threads.made = (*Threads.made, self)

    def start(self, address, name, size):
        self.said, self.stopped = None, threading.Event()
        self.begun.append(size)
        for rank in (rank for rank in self.mine if rank < size):
            arguments = connect(*address), name, rank, self.stopped
            self.running.append(threading.Thread(target=self.serve, args=arguments, daemon=True))
            self.running[-1].start()

    def serve(self, store, name, rank, stopped):
        store.set(f"{name}/ready/{rank}", "")
        for number in range(10):
            key = f"{name}/request/{number}"
            while not store.check([key]):
                if stopped.wait(0.005):
                    return
            request = json.loads(store.get(key))
            what = (
                request["do"]
                if rank in request.get("on", [rank])
                else request.get("others", "answer")
            )
            if what == "die":
                self.said = f"rank {rank} was killed"
            if what in ("die", "hang"):
                return
            answer = {"value": [rank, request["x"]]}
            if what in ("break", "refuse", "PeerError"):
                answer = {"failed": what, "refused": what == "refuse"}
                store.set(f"{name}/failed/{number}", "")
            store.set(f"{name}/answer/{number}/{rank}", json.dumps(answer))

    def lost(self):
        return self.said

    def stop(self):
        self.stopped.set()
        for thread in self.running:
            thread.join(LIMIT)
        self.running = []


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    monkeypatch.setattr(module, "_Own", Threads)
    monkeypatch.setattr(Threads, "made", ())
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.3)


ASKED = {"do": "answer", "x": 5}


def test_ranks_answer_and_restart_in_other_numbers():
    with RankProcesses(None, 3, "cpu") as ranks:
        assert ranks.ask(2, ASKED, LIMIT) == [[0, 5], [1, 5]]
        assert ranks.ask(2, ASKED, LIMIT) == [[0, 5], [1, 5]]
        assert ranks.ask(3, ASKED, LIMIT) == [[0, 5], [1, 5], [2, 5]]
    assert Threads.made[0].begun == [2, 3]


@pytest.mark.parametrize(("asked", "limit", "said", "anew"), [
    ({"do": "refuse"}, LIMIT, "refuse", False),  # all did, so they can go on
    ({"do": "refuse", "on": [1]}, LIMIT, "refuse", True),
    ({"do": "break"}, LIMIT, "break", True),
    ({"do": "die", "on": [1]}, LIMIT, "rank 1 was killed", True),
    ({"do": "break", "on": [1], "others": "PeerError"}, LIMIT, "break", True),
    # Where no name server answers, torch's store may look 5 s for the name of a peer that left.
    pytest.param({"do": "die", "on": [1], "others": "PeerError"}, LIMIT, "rank 1 was killed", True,
                 marks=pytest.mark.exhaustive),
    pytest.param({"do": "hang"}, 0.2, "it took more than 0.2 s", True,
                 marks=pytest.mark.exhaustive),
    pytest.param({"do": "hang", "on": [0]}, 0.2, "it took more than 0.2 s", True,
                 marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_a_failing_point_has_a_reason_and_successors(asked, limit, said, anew):
    with RankProcesses(None, 2, "cpu") as ranks:
        assert ranks.ask(2, ASKED, LIMIT)
        with pytest.raises(PointError) as error:
            ranks.ask(2, ASKED | asked, limit)
        assert str(error.value) == said
        assert ranks.ask(2, ASKED, LIMIT) == [[0, 5], [1, 5]]
    assert Threads.made[0].begun == ([2, 2] if anew else [2])


def test_nobody_waits_for_a_failed_rank():
    with RankProcesses(None, 2, "cpu") as ranks, pytest.raises(PointError, match=r"^break$"):
        ranks.ask(2, ASKED | {"do": "break", "on": [1], "others": "hang"}, 3600)


def test_ranks_that_do_not_begin_are_an_error(monkeypatch):
    monkeypatch.setattr(Threads, "serve", lambda *_: None)
    monkeypatch.setattr(module, "MAX_START_SECONDS", 0.2)
    with (
        RankProcesses(None, 1, "cpu") as ranks,
        pytest.raises(StartError, match="do not begin: they"),
    ):
        ranks.ask(1, ASKED, LIMIT)
    monkeypatch.setattr(Threads, "lost", lambda _: "rank 0 ended with status 1: no such module")
    with RankProcesses(None, 1, "cpu") as ranks, pytest.raises(StartError, match="no such module"):
        ranks.ask(1, ASKED, LIMIT)


def test_launched_processes_are_ranks_and_end_together():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    places = [LaunchedProcess(rank, 3, rank, "127.0.0.1", port, rank == 0) for rank in range(3)]
    others = [threading.Thread(target=follow, args=(x, "cpu"), daemon=True) for x in places[1:]]
    for thread in others:
        thread.start()
    with RankProcesses(places[0], 3, "cpu") as ranks:
        assert ranks.ask(3, ASKED, LIMIT) == [[0, 5], [1, 5], [2, 5]]
        assert ranks.ask(2, ASKED, LIMIT) == [[0, 5], [1, 5]]
        with pytest.raises(PointError, match="rank 1 was killed"):
            ranks.ask(2, ASKED | {"do": "die", "on": [1]}, LIMIT)
        assert ranks.ask(2, ASKED, LIMIT) == [[0, 5], [1, 5]]
    for thread in others:
        thread.join(LIMIT)
        assert not thread.is_alive()
    begun = {own.mine[0]: own.begun for own in Threads.made}
    assert begun == {rank: [3, 2, 2] for rank in range(3)}


def test_how_a_process_ended():
    assert module._ended(-9) == "was killed, as the system does when memory is short"
    assert module._ended(-11) == "was ended by SIGSEGV" and module._ended(3).endswith("status 3")
