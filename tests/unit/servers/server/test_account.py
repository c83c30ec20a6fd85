"""The account of a server's memory, and whose payloads it reads next."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from seqpar.servers.server.account import Account, Turns


async def settle():
    """Let every task go on until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


async def cancel(task):
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Holder:
    """A task that holds bytes of an account until it is told to end."""

    def __init__(self, account, name, size):
        self.holds, self.end = False, asyncio.Event()
        self.task = asyncio.create_task(self.hold(account, name, size))

    async def hold(self, account, name, size):
        await account.wait_and_take(name, size)
        self.holds = True
        try:
            await self.end.wait()
        finally:
            self.holds = False


@pytest.mark.parametrize("names", [1, 2, 3, 7])
def test_greedy_names_leave_their_share(names):
    account, greedy = Account(840), [str(i) for i in range(names)]
    while takers := [name for name in greedy if account.fits(name, 1)]:
        account.count(takers[0], 1)
    assert 840 - account.held >= 840 // 2**names - 1
    assert all(account.room_of(name) == 0 for name in greedy)
    assert account.room_of("honest") == 840 - account.held > 0
    assert account.fits("honest", 840 - account.held)


def test_all_clients_without_certificates_share_everything():
    account = Account(840)
    account.count("", 800)
    assert account.room_of("") == 40 and account.fits("", 40) and not account.fits("", 41)


async def check_waiting(leave):
    """Hold all bytes, let others wait for them, and let the holder leave in some way."""
    account = Account(100)
    first = Holder(account, "", 100)
    await settle()
    others = [Holder(account, "", 30) for _ in range(4)]
    await settle()
    assert first.holds and not any(x.holds for x in others) and account.held == 100
    await cancel(others.pop(0).task)  # it does not count, and does not stop the others
    await leave(first)
    await settle()
    assert all(x.holds for x in others) and account.held == 90
    for each in others:
        each.end.set()
    await asyncio.gather(*(x.task for x in others))
    assert account.held == 0 and not account._held


async def end(holder):
    holder.end.set()
    await holder.task


async def cancel_holder(holder):
    await cancel(holder.task)


@pytest.mark.parametrize("leave", [end, cancel_holder])
def test_who_waits_gets_room_when_a_holder_leaves(leave):
    asyncio.run(check_waiting(leave))


def test_a_names_turns_do_not_delay_another_name():
    async def check():
        turns = Turns(2)
        async with AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_async_context(turns.turn("greedy"))
            third = asyncio.create_task(stack.enter_async_context(turns.turn("greedy")))
            await settle()
            assert not third.done()
            async with asyncio.timeout(20), turns.turn("honest"):
                assert not third.done()
            await cancel(third)
        async with asyncio.timeout(20), turns.turn("greedy"), turns.turn("greedy"):
            pass
        assert not turns._turns and not turns._users  # names are forgotten

    asyncio.run(check())
