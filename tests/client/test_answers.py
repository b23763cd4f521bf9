"""Answers that no broker of ours gives: what a client raises for them is one of its own errors."""

from __future__ import annotations

from typing import Any

import pytest
from rocketlet.client import AnswerUnreadable, Producer
from rocketlet.client.member.offsets import begin_offset
from rocketlet.client.sending.accumulator import sent_result
from rocketlet.client.wire.cluster import Cluster
from rocketlet.client.wire.connection import Connection
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.names import Queue

from ..conftest import Node

GOOD = {"msgId": "0" * 32, "queueId": "0", "queueOffset": "1"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"queueId": "x"},
        {"queueId": "None"},
        {"queueOffset": ""},
        {"queueOffset": "[]"},
        {"queueId": None},
        {"msgId": None},
        {"queueOffset": None},
    ],
)
async def test_a_send_whose_answer_cannot_be_read(node: Node, monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    ext = {name: text for name, text in {**GOOD, **wrong}.items() if text is not None}
    with pytest.raises(AnswerUnreadable):
        sent_result(Frame(0, ext=ext), "key", Queue("t", "b", 0))
    _spoil(monkeypatch, ext)
    async with Producer(node.address, batching=False) as producer:
        with pytest.raises(AnswerUnreadable, match="the answer to a send"):
            await producer.send("t", b"x")


@pytest.mark.parametrize("ext", [{}, {"offset": "x"}, {"offset": str(1 << 63)}])
@pytest.mark.parametrize("start", ["first", "last", 1])
async def test_an_offset_that_cannot_be_read(
    node: Node, monkeypatch: pytest.MonkeyPatch, start: Any, ext: dict[str, str]
) -> None:
    cluster = Cluster(node.address)
    async with Producer(node.address) as producer:
        await producer.send("t", b"x")
    connection = await cluster.connection(node.address)
    _spoil(monkeypatch, ext)
    with pytest.raises(AnswerUnreadable):
        await begin_offset(connection, Queue("t", "broker-a", 0), start)
    await cluster.close()


def _spoil(monkeypatch: pytest.MonkeyPatch, ext: dict[str, str]) -> None:
    """All answers that have no body have these fields."""
    whole = Connection.call

    def call(connection: Connection, code: int, asked: Any, body: bytes, answered: Any, *rest: Any) -> None:
        def spoilt(answer: Frame | Exception) -> None:
            if isinstance(answer, Frame) and not answer.body:
                answer = answer._replace(ext=ext)
            answered(answer)

        whole(connection, code, asked, body, spoilt, *rest)

    monkeypatch.setattr(Connection, "call", call)
