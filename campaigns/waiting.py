"""Messages that wait: delayed, half, sent to a time, to be tried again. Meanwhile their topics are deleted and made anew with
fewer queues, the machine's clock jumps ahead and is set right, and the broker is killed.

A fault is: a deleted topic that is there again, an acknowledged message of a topic that is there and that nobody can read, a
message that a consumer can neither have tried again nor give up, one that expires before its time.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import uvloop
from rocketlet.broker.broker import Broker
from rocketlet.broker.clock import MovableClock
from rocketlet.broker.config import RETENTION_SWEEP_S, BrokerConfig
from rocketlet.broker.nameserver.routes import Routes
from rocketlet.broker.server import Listening, Server
from rocketlet.protocol import names
from rocketlet.protocol.bodies import TopicConfig
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.config import MAX_PROPERTY_BYTES, SENT_PROPERTY_BYTES
from rocketlet.protocol.frame import Ext, Frame

from ._client import Client
from ._ledger import ADDRESS, HOST, read_all
from .common import Limit, Outcome

DEFAULT_COUNT = 200
TOPICS: Final = ("a", "b")
MOST_QUEUES: Final = 4
GROUP: Final = "g"
STEPS: Final = 40  # steps of a try
LEVELS_MS: Final = (2000, 20_000)
DUE_S: Final = 60.0  # then all that waits has come
DAY_S: Final = 86_400.0


class _WallClock(MovableClock):
    """Stands but for `advance`; its wall clock can be set apart from the monotonic one."""

    def __init__(self) -> None:
        super().__init__(stands=True)
        self.set_s = 0.0

    def time_s(self) -> float:
        return super().time_s() + self.set_s


class Half(NamedTuple):
    token: bytes
    end: Ext


class Round:
    """A folder and what was acknowledged. `meant`: where each message is to be read in the end; one whose topic is deleted
    while it waits, or after it came, is not there."""

    def __init__(self, folder: Path, chance: random.Random, outcome: Outcome) -> None:
        self._chance = chance
        self._outcome = outcome
        self._clock = _WallClock()
        self._config = BrokerConfig(
            folder, ADDRESS, segment_bytes=20_000, delay_levels_ms=LEVELS_MS, transaction_sweep_s=DAY_S * 365,
            auto_create_topics=False, vip_channel=False,
        )  # fmt: skip
        self._topics: dict[str, int] = {}
        self._meant: dict[bytes, str] = {}
        self._halves: list[Half] = []
        self._plain: list[bytes] = []
        self._sent = 0

    async def run(self) -> None:
        await self._start()
        kinds: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self._send, 12), (self._change_topic, 4), (self._end_half, 4), (self._send_back, 4), (self._pass, 6),
            (self._jump, 1), (self._kill, 1),
        ]  # fmt: skip
        steps, weights = zip(*kinds, strict=True)
        for name in TOPICS:
            await self._make(name)
        for step in self._chance.choices(steps, weights, k=STEPS):
            await step()
        await self._advance(DUE_S)
        self._check()
        await self._stop()

    async def _start(self) -> None:
        routes = Routes(self._clock)
        self._broker = Broker(self._config, routes, self._clock)
        self._server = Server(Listening("127.0.0.1", 0), broker=self._broker, routes=routes)
        await self._server.__aenter__()
        self._client = Client(self._server)

    async def _stop(self) -> None:
        self._client.hang_up()
        await self._server.__aexit__()
        self._clock.stop()

    async def _kill(self) -> None:
        """Kills the broker: the next start has only the last checkpoint, beside the log."""
        work = self._config.data_dir.with_suffix(".killed")
        async with self._broker.device._jobs:
            shutil.copytree(self._config.data_dir, work)
        await self._stop()
        shutil.rmtree(self._config.data_dir)
        work.rename(self._config.data_dir)
        await self._start()
        self._look_for_deleted("after a kill")

    # Clients and administrators

    async def _make(self, name: str) -> None:
        queues = self._chance.randrange(1, MOST_QUEUES + 1)
        self._broker.topics.put(TopicConfig(name, queues, queues), self._broker.store.end)
        self._topics[name] = queues

    async def _change_topic(self) -> None:
        name = self._chance.choice(TOPICS)
        if name in self._topics:
            stored = {body for (topic, *_), body in read_all(self._broker).items() if topic == name}
            if (await self._client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": name})).code:
                self._outcome.fault("a topic cannot be deleted")
            del self._topics[name]
            self._meant = {body: topic for body, topic in self._meant.items() if topic != name or body not in stored}
        if name not in self._topics and self._chance.random() < 0.6:
            await self._make(name)

    async def _send(self) -> None:
        if not self._topics:
            return
        name = self._chance.choice(list(self._topics))
        self._sent += 1
        token = b"%d" % self._sent + bytes(self._chance.choice((0, 3000)))
        kind = self._chance.choice(("plain", "plain", "delayed", "timed", "half"))
        due_ms = self._clock.time_ms() + 5000
        text = {
            "plain": "",
            "delayed": f"DELAY\x01{self._chance.randrange(1, 3)}",
            "timed": f"TIMER_DELIVER_MS\x01{due_ms}",
            "half": "TRAN_MSG\x01true\x02PGROUP\x01p",
        }[kind]
        if self._chance.random() < 0.5:  # as many properties as there may be, or a few more
            size = self._chance.choice((SENT_PROPERTY_BYTES, MAX_PROPERTY_BYTES)) - self._chance.randrange(250)
            text = f"{text}\x02long\x01".lstrip("\x02")
            text += "x" * (size - len(text))
        sent = await self._client.send(token, b=name, e=self._chance.randrange(self._topics[name]), i=text)
        if sent.code:
            if sent.code != ResponseCode.MESSAGE_ILLEGAL or len(text) < SENT_PROPERTY_BYTES - 300:
                self._outcome.fault(f"a {kind} message is refused: {sent.remark}")
        elif kind == "half":
            position = int(str(sent.ext["msgId"])[-16:], 16)
            end: Ext = {
                "producerGroup": "p",
                "tranStateTableOffset": sent.ext["queueOffset"],
                "commitLogOffset": position,
            }
            self._halves.append(Half(token, {**end, "topic": name}))
        else:
            self._meant[token] = name
            if kind == "plain":
                self._plain.append(token)

    async def _end_half(self) -> None:
        if not self._halves:
            return
        half = self._halves.pop(self._chance.randrange(len(self._halves)))
        name = str(half.end["topic"])
        commits = self._chance.random() < 0.8
        end = {**half.end, "commitOrRollback": 8 if commits else 12}
        done: Frame = await self._client.ask(RequestCode.END_TRANSACTION, end)
        if commits and not done.code:
            self._meant[half.token] = name
        if bool(done.code) != (commits and name not in self._topics):
            self._outcome.fault(f"the end of a transaction is answered with {done.code}: {done.remark}")

    async def _send_back(self) -> None:
        """A consumer could not handle a message, of this release or an earlier one."""
        store, name = self._broker.store, self._chance.choice(TOPICS)
        if name not in self._topics:
            return
        is_earlier = self._chance.random() < 0.3
        if is_earlier:  # which left no room
            with self._broker.appender.batch() as now_ms:
                text = b"long\x01" + b"x" * (MAX_PROPERTY_BYTES - 5 - self._chance.randrange(400))
                place = store.stage(store.queue(name, 0), b"earlier", text, 0, 0, 0, now_ms, HOST)
        queue = store.queue(name, 0)
        if queue.begin == queue.next:
            return
        offset = place[1] if is_earlier else self._chance.randrange(queue.begin, queue.next)
        is_first = store.message(queue, offset).body != b"earlier"
        position = queue.entry(offset)[0]
        dead, retried = self._ends()
        back: Ext = {
            "offset": position, "group": GROUP, "delayLevel": self._chance.choice((0, 1, -1)), "originMsgId": "",
            "originTopic": name, "unitMode": "false",
        }  # fmt: skip
        answer = await self._client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back)
        if answer.code:
            self._outcome.fault(f"a message can be neither tried again nor given up: {answer.remark}")
        elif self._ends() != ((dead + 1, retried) if int(back["delayLevel"]) < 0 else (dead, retried + 1)) and is_first:
            self._outcome.fault("a message that is to be tried again is given up")

    def _ends(self) -> tuple[int, int]:
        """How many messages were given up, and how many are to be tried again."""
        queues = self._broker.store.queues
        levels = [queues.get((names.SCHEDULE_TOPIC, level)) for level in range(len(LEVELS_MS))]
        dead = queues.get((names.dlq_topic(GROUP), 0))
        return dead.next if dead else 0, sum(level.next for level in levels if level)

    # Time

    async def _pass(self) -> None:
        await self._advance(self._chance.choice((0.5, 3.0, 25.0)))

    async def _jump(self) -> None:
        """A month, and the administrator needs some minutes."""
        self._clock.set_s = 30 * DAY_S
        await self._advance(RETENTION_SWEEP_S * self._chance.randrange(1, 5) + 5)
        self._clock.set_s = 0.0
        await self._advance(5.0)

    async def _advance(self, seconds: float) -> None:
        for _ in range(max(int(seconds), 1)):
            self._clock.advance(min(seconds, 1.0))
            for _ in range(5):
                await asyncio.sleep(0)
            async with self._broker.device._jobs:  # sweeps that have begun are done
                pass
        await self._broker.turns.done()
        self._client.hang_up()  # silent clients are cut off
        self._client = Client(self._server)
        self._meant = {
            body: topic for body, topic in self._meant.items() if topic in self._topics
        }  # others may have come
        self._look_for_deleted("after some time")

    # Promises

    def _look_for_deleted(self, when: str) -> None:
        for name in TOPICS:
            queues = [queue for topic, queue in self._broker.store.queues if topic == name]
            if name not in self._topics and (self._broker.topics.get(name) is not None or queues):
                self._outcome.fault(f"a deleted topic is there again {when}")

    def _check(self) -> None:
        found = {body: place for place, body in read_all(self._broker).items() if place[0] in TOPICS}
        for token, name in self._meant.items():
            if name not in self._topics:
                continue
            place = found.get(token)
            if place is None:
                self._outcome.fault("an acknowledged message is gone")
            elif place[1] >= self._topics[name]:
                self._outcome.fault("an acknowledged message is where nobody can read it")


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    outcome = Outcome()
    for number in _counted(limit, outcome):
        path = folder / str(number)
        uvloop.run(Round(path, random.Random(f"{seed}-{number}"), outcome).run())
        shutil.rmtree(path)
    return outcome


def _counted(limit: Limit, outcome: Outcome) -> Iterator[int]:
    for number in limit:
        yield number
        outcome.tried += 1
