"""The producer: replays the flights into the topic `flights`, keyed by tail number, tagged by carrier."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from itertools import chain, repeat
from pathlib import Path

import uvloop

from ..client import Producer, RocketletError
from ..client.wire.cluster import ClusterView
from ..protocol.bodies import BrokerData, decode_cluster
from ..protocol.codes import RequestCode
from ..protocol.headers import CreateTopic, write
from .flights import TOTAL, Flight, read_flights

TOPIC = "flights"
IN_FLIGHT = 64
STATUS_EVERY = 256
PATIENCE_S = 30.0  # with processes that all start at once


async def replay(name_server: str, limit: int, rate: float, status: Path | None, *, forever: bool = False) -> int:
    """Sends the flights, at most `rate` a second (0: as fast as they go); returns how many were acknowledged. With
    `forever`, the year begins again when it is over."""
    years = repeat(limit) if forever else (limit,)
    flights = enumerate(chain.from_iterable(map(read_flights, years)))
    sent = 0
    began_s = time.monotonic()

    async def worker(producer: Producer) -> None:
        nonlocal sent
        for number, flight in flights:
            if rate:
                await asyncio.sleep(max(began_s + number / rate - time.monotonic(), 0))
            await _send(producer, flight)
            sent += 1
            if status is not None and sent % STATUS_EVERY == 0:
                _write(status, sent)

    async with Producer(name_server, "replay", timeout_s=PATIENCE_S, retries=10) as producer:
        await _send(producer, next(flights)[1])  # alone: it makes the topic
        sent = 1
        await asyncio.gather(*(worker(producer) for _ in range(IN_FLIGHT)))
    if status is not None:
        _write(status, sent)
    return sent


async def create_topic(name_server: str, queues: int, brokers: int = 1) -> None:
    """Makes the topic on every broker of the cluster, once there are at least so many. Returns when it has a route."""
    cluster = ClusterView(name_server)
    try:
        while len(found := await _brokers(cluster)) < brokers:  # noqa: ASYNC110 (a name server tells nobody)
            await asyncio.sleep(0.05)
        for broker in found:
            connection = await cluster.connection(broker.addresses[0])
            ext = write(CreateTopic(TOPIC, queues, queues, 6))
            await connection.request(RequestCode.UPDATE_AND_CREATE_TOPIC, ext, timeout_s=PATIENCE_S)
        while True:
            route = await cluster.find_route(TOPIC)
            if route is not None and len(route.queues) >= len(found):
                return
            await asyncio.sleep(0.05)
    finally:
        await cluster.close()


async def _brokers(cluster: ClusterView) -> list[BrokerData]:
    return decode_cluster((await cluster.ask_name_server(RequestCode.GET_BROKER_CLUSTER_INFO)).body)


async def _send(producer: Producer, flight: Flight) -> None:
    await producer.send(TOPIC, flight.body, tag=flight.carrier, keys=flight.tail, queue_key=flight.tail)


def _write(path: Path, number: int) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(str(number))
    os.replace(temporary, path)


def main() -> int:
    parser = argparse.ArgumentParser(description="replay the flights of 2013")
    parser.add_argument("--nameserver", required=True)
    parser.add_argument("--flights", type=int, default=TOTAL)
    parser.add_argument("--rate", type=float, default=0.0, help="flights a second; 0: as fast as they go")
    parser.add_argument("--forever", action="store_true", help="begin again when the year is over")
    parser.add_argument("--status", type=Path)
    parser.add_argument("--queues", type=int, default=0, help="make the topic with so many queues on each broker first")
    parser.add_argument("--brokers", type=int, default=1, help="wait for so many brokers before that")
    options = parser.parse_args()
    began_s = time.monotonic()
    try:
        if options.queues:
            uvloop.run(create_topic(options.nameserver, options.queues, options.brokers))
        sent = uvloop.run(
            replay(options.nameserver, options.flights, options.rate, options.status, forever=options.forever)
        )
    except RocketletError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 1
    with contextlib.suppress(ZeroDivisionError):
        print(f"sent {sent} flights, {sent / (time.monotonic() - began_s):,.0f}/s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
