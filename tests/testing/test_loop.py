"""Parts that a test has left open are named, and the tests continue."""

from __future__ import annotations

import asyncio
import socket

import pytest
from rocketlet.testing.loop import CheckedLoop
from rocketlet.testing.loop_thread import LoopThread


def test_a_connection_that_was_left_open_is_named_when_the_loop_closes() -> None:
    loop = CheckedLoop()
    ours, theirs = socket.socketpair()
    with theirs:
        loop.run_until_complete(loop.create_connection(asyncio.Protocol, sock=ours))
        with pytest.raises(ResourceWarning, match="unclosed"):
            loop.close()
    assert loop.is_closed()


def test_a_loop_with_nothing_left_closes_in_silence() -> None:
    loop = CheckedLoop()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert loop.is_closed()


def test_a_loop_in_a_thread_does_not_wait_for_what_is_open_either() -> None:
    thread = LoopThread()
    ours, theirs = socket.socketpair()
    with theirs:

        async def leave_open() -> None:
            await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)

        thread.wait(leave_open())
        with pytest.raises(ResourceWarning, match="unclosed"):
            thread.stop()
