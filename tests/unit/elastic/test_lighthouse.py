"""Groups that torchft's lighthouse forms, of threads in place of processes."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from seqpar.elastic.lighthouse import LighthouseRendezvous
from seqpar.elastic.messages import ProcessReport
from tests.support.lighthouses import lighthouse
from tests.support.processes import PROCESSES


@pytest.fixture
def started_by_torchrun(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def member(monkeypatch, started_by_torchrun):
    """A function that makes the sides of processes of one host."""
    with lighthouse(2) as address:
        made = []

        def make(local):
            monkeypatch.setenv("LOCAL_RANK", str(local))
            monkeypatch.setenv("MASTER_PORT", str(1000 + local))
            made.append(LighthouseRendezvous(address))
            return made[-1]

        yield make
        for each in made:
            each.close()


@pytest.fixture
def members(member):
    return [member(local) for local in range(3)]


def together(members, method, *reports):
    """The results of these calls, each with its report, at the same time."""
    with ThreadPoolExecutor(len(members)) as pool:
        calls = [
            pool.submit(getattr(member, method), report)
            for member, report in zip(members, reports, strict=True)
        ]
        return [call.result(30) for call in calls]


def test_members_agree_on_ranks_and_checkpoints(members):
    reports = ProcessReport(4, False), ProcessReport(5, False), ProcessReport(0, False)
    places = together(members, "place", *reports)
    assert [place.rank for place in places] == [0, 1, 2]  # by local rank, on one host
    for place in places:
        assert (place.end, place.ranks, place.source, place.lacking) == ("", 3, 1, (0, 2))
        assert (place.host, place.port) == ("here", 1000)
    assert len({place.generation for place in places}) == 1


def test_the_same_members_keep_their_group(members):
    together(members, "place", *[ProcessReport(0, False)] * 3)
    assert together(members, "regroups", *[ProcessReport(1, False)] * 3) == [False] * 3


def test_a_lost_member_makes_a_smaller_group(members):
    before = together(members, "place", *[ProcessReport(0, False)] * 3)
    members[0].close()
    places = together(members[1:], "place", *[ProcessReport(1, False, True)] * 2)
    assert [(place.rank, place.ranks) for place in places] == [(0, 2), (1, 2)]
    assert places[0].generation != before[0].generation


def test_a_new_process_joins_after_a_step(member):
    old = [member(0), member(1)]
    together(old, "place", *[ProcessReport(0, False)] * 2)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(member(2).place, ProcessReport(0, False))
        while together(old, "regroups", *[ProcessReport(1, False)] * 2) == [False] * 2:
            pass  # the new process has not asked yet
        places = [*together(old, "place", *[ProcessReport(1, False)] * 2), joining.result(30)]
    assert [(place.rank, place.ranks, place.lacking) for place in places] == [
        (rank, 3, (2,)) for rank in range(3)
    ]


def test_a_member_that_was_left_out_returns(members):
    together(members, "place", *[ProcessReport(0, False)] * 3)
    late = members[2]
    late._closed.set()  # it is silent for a while, and the others continue without it
    places = together(members[:2], "place", *[ProcessReport(1, False, True)] * 2)
    assert [place.ranks for place in places] == [2, 2]
    with ThreadPoolExecutor(1) as pool:
        late_one = pool.submit(late.regroups, ProcessReport(1, False))  # as if nothing had happened
        while together(members[:2], "regroups", *[ProcessReport(2, False)] * 2) == [False] * 2:
            pass  # the late one has not asked yet
        assert late_one.result(30)
    places = together(members, "place", *[ProcessReport(2, False)] * 3)
    assert [(place.end, place.ranks, place.lacking) for place in places] == [("", 3, (2,))] * 3
    assert len({place.generation for place in places}) == 1


def test_a_failure_without_a_loss_ends_all(members):
    together(members, "place", *[ProcessReport(0, False)] * 3)
    reports = ProcessReport(1, False, True), ProcessReport(1, False, True), ProcessReport(1, False)
    with ThreadPoolExecutor(1) as pool:
        goes_on = pool.submit(members[2].regroups, reports[2])  # it had finished the step
        places = together(members[:2], "place", *reports[:2])
        assert goes_on.result(30)
    places.append(members[2].place(reports[2]))
    assert [place.end for place in places] == ["unchanged"] * 3


def test_the_training_ends_when_all_are_done(members):
    together(members, "place", *[ProcessReport(0, False)] * 3)
    places = together(members, "place", *[ProcessReport(9, True)] * 3)
    assert [place.end for place in places] == ["done"] * 3


def test_a_store_in_the_process_is_refused(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=r"^TORCHFT_LIGHTHOUSE needs a store that outlives"):
        LighthouseRendezvous("http://127.0.0.1:1")


def serve(pipe):
    with lighthouse(2) as address:
        pipe.send(address)
        pipe.recv()  # for ever


def test_nobody_waits_for_a_dead_lighthouse(monkeypatch, started_by_torchrun):
    pytest.importorskip("torchft.coordination")  # without it, the other process sends no address
    monkeypatch.setattr("seqpar.elastic.lighthouse._SILENCE_SECONDS", 2.0)
    here, there = PROCESSES.Pipe()
    process = PROCESSES.Process(target=serve, args=(there,), daemon=True)
    process.start()
    member = LighthouseRendezvous(here.recv())
    with ThreadPoolExecutor(1) as pool:
        place = pool.submit(member.place, ProcessReport(0, False))
        process.kill()
        with pytest.raises(RuntimeError, match=r"^the lighthouse http://\S+ does not answer"):
            place.result(30)
    member.close()


def test_an_unreachable_lighthouse_is_an_error(monkeypatch, started_by_torchrun):
    pytest.importorskip("torchft.coordination")
    monkeypatch.setattr("seqpar.elastic.lighthouse._CONNECT", timedelta(seconds=0.2))
    with pytest.raises(RuntimeError, match=r"failed to connect to http://127.0.0.1:1"):
        LighthouseRendezvous("http://127.0.0.1:1")
