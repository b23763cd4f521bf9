"""Strangers ask for everything: requests of every code and calls of every method, which may have no effect, to a broker with
accounts and to one that takes TLS only.

Each stranger is one of these: without a key, with a key that nobody has, with an account's key and a wrong signature, a
signature of other content, an account that may do nothing, or an administrator who speaks plain text where TLS is enforced.
The frames are those of `frames`, without the odd bytes; every third stranger speaks gRPC, with the messages of `calls`.
After each request it looks at everything that must not change; the secrets are in the bodies of a topic. A fault is:
something has changed, the word is in an answer, a request was done that is refused to strangers, or an honest client is
refused. This campaign does not read the table of rules.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop
from rocketlet.broker.access import Acl, AclFile
from rocketlet.broker.broker import BrokerController
from rocketlet.broker.config import BrokerConfig
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.server import Listening, Server
from rocketlet.broker.tls import Tls
from rocketlet.protocol.bodies import GroupConfig, TopicConfig
from rocketlet.protocol.codes import RequestCode, request_name
from rocketlet.protocol.frame import JSON, Frame, FrameReader, encode
from rocketlet.protocol.headers import ACCESS_KEY, SIGNATURE, Signer

from tests.support.accounts import ACCOUNTS, ADMIN, SECRETS, SEND, AccountsFile, account
from tests.support.certificates import Certificates

from ._fuzz import Fuzz
from ._strange_calls import PLAIN_CALLS, SIGNS, StrangeCall
from .common import Limit, Outcome
from .frames import Peer, Socket
from .store import put

SECRET = b"nobody-may-read-this"
NOBODY = "nobody-key"
CURIOUS = "curious-key"
HONEST_EVERY = 50
HONEST_TOPIC = "orders"
TOPICS = ("t", "u")
INNER = (*TOPICS, "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "DefaultCluster_REPLY_TOPIC", "%DLQ%g", "%RETRY%g")

OPEN = frozenset(
    (
        RequestCode.HEART_BEAT,  # for a client that is in no group
        RequestCode.UNREGISTER_CLIENT,
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        RequestCode.GET_BROKER_CLUSTER_INFO,
        RequestCode.GET_DEPARTED_BROKERS,
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
        RequestCode.GET_TOPICS_BY_CLUSTER,
        RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS,
        RequestCode.GET_KV_CONFIG,
        RequestCode.GET_KVLIST_BY_NAMESPACE,
    )
)
"""Requests that an account without permissions may send, as with Apache: name servers tell everybody where topics are. A
request that names no topic asks for nothing."""

REPLIES = (RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2)  # which every account may send

Strange = Callable[[Frame, random.Random], Frame]


def _as_nobody(frame: Frame, chance: random.Random) -> Frame:
    return _signed(frame, NOBODY, SECRETS[NOBODY])


def _as_curious(frame: Frame, chance: random.Random) -> Frame:
    """Looks for denied messages where brokers keep what is of other topics and groups."""
    ext: dict[str, str | int | bool] = {
        "topic": chance.choice(INNER),
        "key": "k",
        "maxNum": 64,
        "beginTimestamp": 0,
        "endTimestamp": 2**62,
    }
    return _signed(Frame(RequestCode.QUERY_MESSAGE, frame.opaque, ext), CURIOUS, SECRETS[CURIOUS])


def _without_key(frame: Frame, chance: random.Random) -> Frame:
    return frame


def _with_unknown_key(frame: Frame, chance: random.Random) -> Frame:
    return _signed(frame, "a-stranger", "secret-of-a-stranger")


def _with_wrong_secret(frame: Frame, chance: random.Random) -> Frame:
    return _signed(frame, ADMIN, chance.choice((SECRETS[NOBODY], "guessed-secret", "x" * 100)))


def _with_odd_signature(frame: Frame, chance: random.Random) -> Frame:
    odd = chance.choice(("", "x", "AAAAAAAAAAAAAAAAAAAAAAAAAAA=", "ä", ADMIN))
    return frame._replace(ext={**frame.ext, ACCESS_KEY: ADMIN, SIGNATURE: odd})


def _without_signature(frame: Frame, chance: random.Random) -> Frame:
    return frame._replace(ext={**frame.ext, ACCESS_KEY: ADMIN})


def _as_administrator(frame: Frame) -> Frame:
    return _signed(frame, ADMIN, SECRETS[ADMIN])


def _changed_afterwards(frame: Frame, chance: random.Random) -> Frame:
    signed = _as_administrator(frame)
    if chance.random() < 0.5:
        return signed._replace(body=signed.body + b" ")
    return signed._replace(ext={**signed.ext, "zz": "added"})


def _signed(frame: Frame, key: str, secret: str) -> Frame:
    ext = {**frame.ext, ACCESS_KEY: key}
    return frame._replace(ext={**ext, SIGNATURE: Signer(secret).signature(ext, frame.body)})


NOBODY_MAY = "an account without permissions"
STRANGERS: dict[str, Strange] = {
    NOBODY_MAY: _as_nobody,
    "an account that may read all topics but these": _as_curious,
    "no key": _without_key,
    "an unknown key": _with_unknown_key,
    "another secret": _with_wrong_secret,
    "an odd signature": _with_odd_signature,
    "no signature": _without_signature,
    "a signature of something else": _changed_afterwards,
}
PLAIN = "an administrator without TLS"


class Guarded:
    """A broker, and what of it no stranger may change."""

    def __init__(self, folder: Path, *, enforces_tls: bool) -> None:
        folder.mkdir()
        self._file = AccountsFile(folder / "plain_acl.yml")
        denied = {"topicPerms": [f"{topic}=DENY" for topic in TOPICS], "groupPerms": ["g=DENY"]}
        reader = account(CURIOUS, defaultTopicPerm="SUB", defaultGroupPerm="SUB", **denied)
        self._file.write([*ACCOUNTS, reader])
        self._routes = Routes()
        self._broker = BrokerController(BrokerConfig(folder / "data", "127.0.0.1:9", vip_channel=False), self._routes)
        tls = Tls("enforcing", Certificates.make(folder).files) if enforces_tls else None
        self.server = Server(
            Listening("127.0.0.1", 0, acl=Acl(AclFile(self._file.path)), tls=tls),
            broker=self._broker,
            routes=self._routes,
        )

    def fill(self) -> None:
        broker = self._broker
        for name in (*TOPICS, HONEST_TOPIC):
            broker.topics.put(TopicConfig(name, 4, 4), 0)
        for group in ("g", "h"):
            broker.group_configs.put(GroupConfig(group))
            broker.offsets.put(group, "t", 0, 1)
        for number in range(12):
            put(broker, broker.store.queue("t", number % 4), SECRET, b"KEYS\x01k\x02TAGS\x01A")
        for name in INNER:
            put(broker, broker.store.queue(name, 0), SECRET, b"KEYS\x01k\x02REAL_TOPIC\x01t\x02REAL_QID\x010")

    async def done(self) -> None:
        """Returns when everything is answered."""
        await self._broker.turns.done()

    def state(self) -> dict[str, Any]:
        broker, routes = self._broker, self._routes
        groups = broker.offsets.groups()
        return {
            "the commit log": broker.store.end,
            "topics": list(broker.topics),
            "groups": list(broker.group_configs),
            "offsets": {(group, topic): dict(broker.offsets.of(group, topic)) for group in groups for topic in TOPICS},
            "members": [group.name for group in broker.groups if group.client_ids()],
            "locks": len(broker.locks),
            "registered brokers": routes.brokers(),
            "routes": [routes.route(topic) for topic in TOPICS],
            "settings of the name server": {name: dict(values) for name, values in routes.kv.items()},
            "accounts": self._file.path.read_bytes(),
            "settings": broker.config,
        }


class Caller(Peer):
    """A socket of the server's own, which decides by the first byte who speaks on."""

    def __init__(self, server: Server, port: int) -> None:
        self.socket = Socket(port, "127.0.0.1")
        self._entrance = self.socket.protocol = server._entrance()
        self._entrance.connection_made(self.socket)
        self._reader = FrameReader()

    def send(self, data: bytes) -> None:
        self._entrance.data_received(data)

    def hang_up(self) -> None:
        self.socket.close()
        assert self.socket.protocol is not None
        self.socket.protocol.connection_lost(None)


class Attack:
    def __init__(self, guarded: Guarded, outcome: Outcome, seed: int) -> None:
        self._guarded = guarded
        self._outcome = outcome
        self._fuzz = Fuzz(seed)
        self._random = random.Random(~seed)
        self._guarded.fill()
        self._state = guarded.state()

    async def attack(self, stranger: str) -> None:
        """One request of a stranger, on a connection of its own."""
        if stranger in SIGNS:
            await self._call(stranger)
            return
        request = self._fuzz.request(self._random.randrange(1 << 31))
        ext = {name: str(value) for name, value in request.ext.items()}
        frame = request._replace(ext=ext, serialize_type=JSON, code=abs(request.code) % (1 << 31))
        frame = _as_administrator(frame) if stranger == PLAIN else STRANGERS[stranger](frame, self._random)
        try:
            data = encode(frame)
        except Exception:  # lone surrogates and such, which no client can send
            return
        caller = Caller(self._guarded.server, 1000)
        caller.send(data)
        await self._guarded.done()
        self._check_answers(caller, frame, stranger)
        self._check_state(request_name(frame.code), stranger, is_reply=frame.code in REPLIES)
        caller.hang_up()

    async def _call(self, stranger: str) -> None:
        """The same by gRPC."""
        call = StrangeCall(stranger, self._random, INNER)
        caller = Caller(self._guarded.server, 1000)
        caller.send(call.data)
        await self._guarded.done()
        call.written = b"".join(caller.socket.written)
        if SECRET in call.written:
            self._outcome.fault(f"{stranger}: {call.method} tells what nobody may read")
        if call.is_done and not call.is_allowed:
            self._outcome.fault(f"{stranger}: {call.method} is done")
        self._outcome.figures["refused"] += not call.is_done
        self._check_state(call.method, stranger)
        caller.hang_up()

    def _check_answers(self, caller: Caller, frame: Frame, stranger: str) -> None:
        if SECRET in b"".join(caller.socket.written):
            self._outcome.fault(f"{stranger}: {request_name(frame.code)} tells what nobody may read")
        answers = [answer for answer in caller.received() if answer.is_response]
        asks_nothing = frame.ext.get("topic") == "" or all(
            answer.body == b"{}" for answer in answers
        )  # such as of no topics
        is_allowed = stranger == NOBODY_MAY and (frame.code in OPEN or asks_nothing)
        if any(answer.code == 0 for answer in answers) and not is_allowed:
            self._outcome.fault(f"{stranger}: {request_name(frame.code)} is done")
        self._outcome.figures["refused"] += sum(answer.code != 0 for answer in answers)

    def _check_state(self, request: str, stranger: str, *, is_reply: bool = False) -> None:
        state = self._guarded.state()
        is_reply = is_reply and stranger == NOBODY_MAY
        for part, before in self._state.items():
            if state[part] != before and not (is_reply and part == "the commit log"):
                self._outcome.fault(f"{stranger}: {request} changes {part}")
        self._state = state

    def send_honestly(self) -> None:
        """A permitted send still works."""
        frame = Frame(RequestCode.SEND_MESSAGE_V2, 1, {name: str(value) for name, value in SEND.items()}, b"honest")
        caller = Caller(self._guarded.server, 1)
        caller.send(encode(_signed(frame, "orders-key", SECRETS["orders-key"])))
        if [answer.code for answer in caller.received()] != [0]:
            self._outcome.fault("an honest client is refused")
        caller.hang_up()
        self._state = self._guarded.state()


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    outcome = Outcome(figures={"refused": 0})
    uvloop.run(_run(limit, seed, folder, outcome))
    return outcome


async def _run(limit: Limit, seed: int, folder: Path, outcome: Outcome) -> None:
    open_to_plain = Guarded(folder / "plain", enforces_tls=False)
    enforcing = Guarded(folder / "tls", enforces_tls=True)
    async with open_to_plain.server, enforcing.server:
        by_accounts, by_tls = Attack(open_to_plain, outcome, seed), Attack(enforcing, outcome, seed)
        names = [name for other in (*STRANGERS, PLAIN) for name in (other, NOBODY_MAY)]
        callers = list(SIGNS)
        for number in limit:
            of_kind = names if number % 3 else callers
            stranger = of_kind[number // 3 % len(of_kind)]
            try:
                await (by_tls if stranger in (PLAIN, PLAIN_CALLS) else by_accounts).attack(stranger)
                if number % HONEST_EVERY == 0:
                    by_accounts.send_honestly()
                    await asyncio.sleep(0)
            except Exception as error:
                outcome.fault(f"{stranger}: {type(error).__name__}: {error}")
            outcome.tried += 1
