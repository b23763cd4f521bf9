"""The official Python client of 5.x, as `Five.java`: `five_client.py endpoint topic group count threads redeliveries`."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from rocketmq import (
    ClientConfiguration,
    Credentials,
    FilterExpression,
    Message,
    Producer,
    SimpleConsumer,
)

ENDPOINT, TOPIC, GROUP = sys.argv[1:4]
COUNT, THREADS, REDELIVERIES = map(int, sys.argv[4:])


def say(text: str) -> None:
    print(text, flush=True)


def phase(name: str, work: Callable[[], None]) -> None:
    say(f"phase {name}")
    sys.stdin.readline()
    began_s = time.perf_counter()
    work()
    say(f"took {time.perf_counter() - began_s}")


def started(work: Callable[[], None]) -> list[threading.Thread]:
    def run() -> None:
        try:
            work()
        except BaseException as error:
            say(f"failed {error!r}")
            os._exit(1)

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    return threads


def joined(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join()


def message() -> Any:
    made = Message()
    made.topic, made.body = TOPIC, bytes(1024)
    return made


configuration = ClientConfiguration(ENDPOINT, Credentials())
consumer = SimpleConsumer(configuration, GROUP, {TOPIC: FilterExpression()}, 5)
consumer.startup()
for tries_left in reversed(range(100)):
    try:
        consumer.receive(1, 60)  # the group begins here
        break
    except Exception:  # Apache's proxy answers so until it has taken the client's settings
        if not tries_left:
            raise
        time.sleep(0.1)
producer = Producer(configuration, (TOPIC,))
producer.startup()


def send() -> None:
    for _ in range(COUNT // THREADS):
        producer.send(message())


def consume() -> None:
    done, lock, all_done = [0], threading.Lock(), threading.Event()

    def work() -> None:
        while not all_done.is_set():
            for view in consumer.receive(32, 60) or ():
                consumer.ack(view)
                with lock:
                    done[0] += 1
                if done[0] >= COUNT:
                    all_done.set()

    waiting.extend(started(work))
    all_done.wait()  # the last receives wait in vain


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
        say(f"late {(time.perf_counter() - due_s) * 1000}")
        consumer.ack(again)


waiting: list[threading.Thread] = []
phase("send", lambda: joined(started(send)))
phase("consume", consume)
joined(waiting)
phase("redeliver", redeliver)
os._exit(0)  # its threads would keep running
