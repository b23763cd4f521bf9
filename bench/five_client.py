"""The official Python client of 5.x, as `Five.java`: `five_client.py endpoint topic group count threads redeliveries`."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

from rocketmq import ClientConfiguration, Credentials, FilterExpression, Message, Producer, SimpleConsumer

ENDPOINT, TOPIC, GROUP = sys.argv[1:4]
COUNT, THREADS, REDELIVERIES = map(int, sys.argv[4:])
AWAIT_S = 5  # how long a receive waits; Apache's proxy refuses shorter ones

configuration = ClientConfiguration(ENDPOINT, Credentials())
consumer = SimpleConsumer(configuration, GROUP, {TOPIC: FilterExpression()}, AWAIT_S)
producer = Producer(configuration, (TOPIC,))
pool = ThreadPoolExecutor(THREADS)


def phase(name: str, work: Callable[[], None]) -> None:
    print(f"phase {name}", flush=True)
    sys.stdin.readline()
    began_s = time.perf_counter()
    work()
    print(f"took {time.perf_counter() - began_s}", flush=True)


def message() -> Any:
    made = Message()
    made.topic, made.body = TOPIC, bytes(1024)
    return made


def begin() -> None:
    consumer.startup()
    for tries_left in reversed(range(100)):
        try:
            consumer.receive(1, 60)  # the group begins here
            break
        except Exception:  # Apache's proxy answers so until it has taken the client's settings
            if not tries_left:
                raise
            time.sleep(0.1)
    producer.startup()


def send() -> None:
    started = itertools.count(1)  # which threads may share

    def work() -> None:
        while next(started) <= COUNT:
            producer.send(message())

    for sending in [pool.submit(work) for _ in range(THREADS)]:
        sending.result()


def consume() -> None:
    acknowledged = itertools.count(1)
    over: list[bool] = []

    def work() -> None:
        while not over:
            for view in consumer.receive(32, 60) or ():
                consumer.ack(view)
                if next(acknowledged) == COUNT:
                    over.append(True)

    receiving = [pool.submit(work) for _ in range(THREADS)]
    for future in wait(receiving, return_when=FIRST_COMPLETED).done:  # it has received the last message, or failed
        future.result()


def received() -> Any:
    while True:
        for view in consumer.receive(1, 60) or ():
            return view


def redeliver() -> None:
    for _ in range(REDELIVERIES):
        producer.send(message())
        consumer.change_invisible_duration(received(), 3)
        due_s = time.perf_counter() + 3
        again = received()
        print(f"late {(time.perf_counter() - due_s) * 1000}", flush=True)
        consumer.ack(again)


try:
    begin()
    phase("send", send)
    phase("consume", consume)
    if REDELIVERIES:
        pool.shutdown()  # the last receives would get what is redelivered
        phase("redeliver", redeliver)
except BaseException as error:
    print(f"failed {error!r}", flush=True)
    os._exit(1)
os._exit(0)  # its threads would keep running
