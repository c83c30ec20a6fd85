"""The model of NCCL's rules itself: what it calls a deadlock, and the times of known programs."""

import pytest
import torch

from tests.support.nccl import Deadlock, nccl


def message(peer, elements=1):
    return peer, torch.zeros(elements, dtype=torch.float64)


def post(comm, to=(), source=(), label="x", step=0):
    return comm.exchange(map(message, to), map(message, source), label=label, step=step)


def both_receive_first(comm):
    """On gloo right; on a communicator each receive is ahead of the send that the other awaits."""
    peer = 1 - comm.rank
    posted = [post(comm, source=[peer]), post(comm, to=[peer])]
    for pending in posted:
        pending.wait()


def both_at_once(comm):
    post(comm, to=[1 - comm.rank], source=[1 - comm.rank]).wait()


def one_receives_first(comm):
    peer, first = 1 - comm.rank, comm.rank
    posted = [post(comm, **{"source" if i == first else "to": [peer]}) for i in (0, 1)]
    for pending in posted:
        pending.wait()


def on_two_communicators(comm, other="second"):
    """Each rank posts first on another one."""
    comms = [comm, comm.beside(other, [0, 1])]
    for each in comms:
        each.join()
    posted = [post(x, [1 - comm.rank], [1 - comm.rank]) for x in comms[:: 1 - 2 * comm.rank]]
    for pending in posted:
        pending.wait()


def one_ends(comm):
    comm.join()
    if comm.rank == 0:
        post(comm, to=[1], label="farewell", step=3)  # not waited for: the device still has it


def one_has_nothing_to_send(comm):
    """Rank 2 uses another communicator, which the others make after theirs."""
    if comm.rank < 2:
        post(comm, [1 - comm.rank], [1 - comm.rank]).wait()
    peers = [peer for peer in range(3) if peer != comm.rank]
    post(comm.beside("second", [0, 1, 2]), peers, peers).wait()


def all_take_part(comm):
    comm.join()
    one_has_nothing_to_send(comm)


def ring_of_waits(comm):
    """Each rank waits for the one before, and only then sends to the next."""
    comm.join()
    post(comm, source=[(comm.rank - 1) % 3]).wait()
    post(comm, to=[(comm.rank + 1) % 3]).wait()


@pytest.mark.parametrize(("program", "ranks"), [(both_at_once, 2), (one_receives_first, 2)])
@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_a_program_that_ends_is_not_a_deadlock(program, ranks, one_at_a_time):
    nccl(ranks, program, one_at_a_time=one_at_a_time)


def test_communicators_wait_only_when_the_device_is_full():
    nccl(2, on_two_communicators)
    with pytest.raises(Deadlock, match="rank 1 has it behind"):
        nccl(2, on_two_communicators, one_at_a_time=True)


DEADLOCKS = [
    (both_receive_first, 2, r"rank 0 waits for .*rank 1 has it behind"),
    (one_ends, 2, r"rank 0 waits for .*farewell.*rank 1 has not posted the receive.*\n.*1 has end"),
    (one_has_nothing_to_send, 3, r"rank 0 waits for the communicator of 'world', .*\[2\]"),
    (one_has_nothing_to_send, 3, r"rank 2 waits for the communicator of 'second', .*\[0, 1\]"),
    (ring_of_waits, 3, r"rank 2 waits for .*rank 1 has not posted the send"),
]


@pytest.mark.parametrize(("program", "ranks", "said"), DEADLOCKS)
def test_a_deadlock_is_found_and_explained(program, ranks, said):
    with pytest.raises(Deadlock, match=said):
        nccl(ranks, program)


def test_a_shared_first_communicator_is_no_deadlock():
    nccl(3, all_take_part)


def test_a_raising_rank_is_blamed_not_its_waiters():
    def program(comm):
        if comm.rank == 1:
            raise ZeroDivisionError
        both_at_once(comm)

    with pytest.raises(ZeroDivisionError):
        nccl(2, program)


def behind(comm):
    """Two of 2 s each, one after another, and 3 s of compute beside them."""
    posted = [post(comm, [1 - comm.rank], [1 - comm.rank], step=step) for step in (0, 1)]
    comm.work(3.0)
    for pending in posted:
        pending.wait()


def beside(comm):
    """The same on two communicators."""
    posted = [post(x, [1 - comm.rank], [1 - comm.rank]) for x in (comm, comm.beside("b", [0, 1]))]
    for pending in posted:
        pending.wait()
