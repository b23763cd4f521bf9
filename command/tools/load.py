"""Sends and consumes for some seconds, and measures it. The topic and the group are created for the run. They are deleted
afterwards, unless the brokers refuse or cannot be reached."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import struct
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ...client.admin.admin_client import AdminClient
from ...client.consumer import Consumer
from ...client.errors import ConfigError, RocketletError
from ...client.message import Message
from ...client.producer import Producer
from ...client.wire.connection import Access
from ..config import (
    BENCH_DRAIN_S,
    MAX_BENCH_BYTES,
    MAX_BENCH_IN_FLIGHT,
    MAX_BENCH_QUEUES,
    MAX_BENCH_SECONDS,
    MIN_BENCH_BYTES,
)

BATCH_SIZE = 256
_SENT_AT = struct.Struct("!Q")  # start of a body: the time of its send, ns of time.perf_counter_ns


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a benchmark.

    Attributes:
        seconds: the duration.
        rate: messages per second; 0 for as many as possible.
        size: the size of each body in bytes.
        queues: the queues of the topic on each broker.
        in_flight: the maximum number of concurrent sends.
    """

    seconds: float = 5.0
    rate: float = 0.0
    size: int = 1024
    queues: int = 8
    in_flight: int = 64

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("--seconds", self.seconds, 0.1, MAX_BENCH_SECONDS),
            ("--rate", self.rate, 0, math.inf),
            ("--size", self.size, MIN_BENCH_BYTES, MAX_BENCH_BYTES),
            ("--queues", self.queues, 1, MAX_BENCH_QUEUES),
            ("--in-flight", self.in_flight, 1, MAX_BENCH_IN_FLIGHT),
        ):
            if not least <= value <= most:
                raise ConfigError(f"{name} {value:.10g}: use {least:.10g} to {most:.10g}")


@dataclass(slots=True)
class LoadSide:
    """Latencies of the successful sends of a run, or of its consumed messages."""

    latencies_ms: array[float] = field(default_factory=lambda: array("d"))
    began_s: float = 0.0
    ended_s: float = 0.0

    def record(self, latency_ms: float) -> None:
        self.latencies_ms.append(latency_ms)
        self.ended_s = time.perf_counter()

    @property
    def per_s(self) -> float:
        took_s = self.ended_s - self.began_s
        return len(self.latencies_ms) / took_s if took_s > 0 else 0.0

    def percentiles_ms(self, parts: Sequence[float]) -> list[float]:
        """Return percentiles of the latencies in ms, for example of 0.99 for p99; 0 if there are none."""
        ordered = sorted(self.latencies_ms)
        return [ordered[max(math.ceil(part * len(ordered)), 1) - 1] if ordered else 0.0 for part in parts]


@dataclass(frozen=True, slots=True)
class Outcome:
    sent: LoadSide
    consumed: LoadSide
    failed: int
    fault: str

    @property
    def missing(self) -> int:
        return len(self.sent.latencies_ms) - len(self.consumed.latencies_ms)


async def apply(name_server: str, load: Load, access: Access) -> Outcome:
    """Create a topic, send to it and consume from it concurrently, and delete it with its group. Return what was measured.
    Raises RocketletError, but only counts single sends that fail."""
    name = f"rocketlet-bench-{secrets.token_hex(4)}"
    async with AdminClient(name_server, access=access) as admin:
        try:
            await admin.create_topic(name, queues=load.queues)
            return await _Run(name_server, name, load, access).run()
        finally:
            await _clean(admin, name)


async def _clean(admin: AdminClient, name: str) -> None:
    """Delete the topic and group of the run. Continue if one of the requests fails."""
    deletions = (admin.delete_group(name), admin.delete_topic(name))
    for deletion in deletions:
        with suppress(RocketletError):
            await deletion


class _Run:
    def __init__(self, name_server: str, name: str, load: Load, access: Access) -> None:
        self._name_server = name_server
        self._name = name
        self._load = load
        self._access = access
        self._sent, self._consumed = LoadSide(), LoadSide()
        self._failed = 0
        self._fault = ""
        self._all_consumed = asyncio.Event()
        self._is_sent = False

    async def run(self) -> Outcome:
        name, server = self._name, self._name_server
        async with (
            Consumer(
                server, name, name, self._handle, batch_size=BATCH_SIZE, start="first", access=self._access
            ) as consumer,
            Producer(server, name, access=self._access) as producer,
        ):
            await consumer.assigned()
            self._sent.began_s = self._consumed.began_s = time.perf_counter()
            numbers = iter(range(1 << 62))
            await asyncio.gather(*(self._send_on(producer, numbers) for _ in range(self._load.in_flight)))
            self._is_sent = True
            self._check_all_consumed()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_consumed.wait(), BENCH_DRAIN_S)
        return Outcome(self._sent, self._consumed, self._failed, self._fault)

    async def _send_on(self, producer: Producer, numbers: Iterator[int]) -> None:
        """Send messages until the load's time is over, each after the response to the previous one and, with a rate, not
        before its time. Count sends that fail."""
        began_s, filler = self._sent.began_s, os.urandom(self._load.size - _SENT_AT.size)
        end_s = began_s + self._load.seconds
        for number in numbers:
            due_s = began_s + number / self._load.rate if self._load.rate else 0.0
            if number and max(due_s, time.perf_counter()) >= end_s:
                return
            if due_s > time.perf_counter():
                await asyncio.sleep(due_s - time.perf_counter())
            sent_ns = time.perf_counter_ns()
            try:
                await producer.send(self._name, _SENT_AT.pack(sent_ns) + filler)
            except RocketletError as error:
                self._failed += 1
                self._fault = str(error)
            else:
                self._sent.record((time.perf_counter_ns() - sent_ns) / 1e6)

    async def _handle(self, messages: list[Message]) -> None:
        now_ns = time.perf_counter_ns()
        for message in messages:
            self._consumed.record((now_ns - _SENT_AT.unpack_from(message.body)[0]) / 1e6)
        self._check_all_consumed()

    def _check_all_consumed(self) -> None:
        if self._is_sent and len(self._consumed.latencies_ms) >= len(self._sent.latencies_ms):
            self._all_consumed.set()
