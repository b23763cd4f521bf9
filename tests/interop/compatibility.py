"""docs/compatibility.md, made of what the interop tests proved."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from rocketlet.broker.remoting.dispatch import BROKER_REQUESTS, NAME_SERVER_REQUESTS, SENDS
from rocketlet.protocol.codes import RequestCode


@dataclass
class Proofs:
    """Request codes with the clients that used them, and features (area, text) with the clients that showed them."""

    requests: set[tuple[int, str]] = field(default_factory=set)
    features: set[tuple[str, str, str]] = field(default_factory=set)


TO_CLIENT = frozenset(
    (
        RequestCode.CHECK_TRANSACTION_STATE,
        RequestCode.NOTIFY_CONSUMER_IDS_CHANGED,
        RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
        RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT,
        RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT,
    )
)
OURS: dict[int, str] = {
    RequestCode.GET_GROUP_HISTORY: "`rocketlet groups show`",
    RequestCode.GET_QUEUE_OFFSETS: "Spark",
    RequestCode.IDENTIFY: "clients with TLS and accounts",
    RequestCode.AGREE_ON_MEMBERS: "brokers, of groups with foreign members",
    RequestCode.CONFIRM_WORD: "peers that check who sent an AGREE_ON_MEMBERS request",
}
# Requests that 4.9 has and we do not, and our answers.
REFUSED = {
    "13, 22, 23, 27, 209-214, 301, 302": "3, as from Apache's broker: nothing in 4.9 handles them",
    "311-313 unit topics": "3: units are not supported",
    "318 UPDATE_NAMESRV_CONFIG": "3: the name server has nothing to set",
    "60, 61 timer metrics": "3: no tool sends them; the metric `rocketlet_timed_waiting` counts timed messages",
    "5001 SWITCH_TIMER_ENGINE": "3: there is one engine for timed messages",
    "all others, 5.x ones too": "3; Apache's name server does not answer at all",
}
INTRODUCTION = """\
# Compatibility

`pytest tests/interop --compatibility docs/compatibility.md` writes this page from the tests that passed. Each line was tested
with an unmodified client. Go is `github.com/apache/rocketmq-client-go/v2`; Rocketlet's own client uses most features, too.
Error codes are Apache's, error texts are Rocketlet's.

Rocketlet's broker has no master/slave replication, DLedger, controller or tiered storage.
If you need one of them, use Apache RocketMQ; your code and Spark job need no change.

Rocketlet's client detects the kind of its broker. [Foreign members](foreign-members.md) lists the differences on Apache's
brokers. In these tests 5.5 differs from 4.9 in two ways. It records the outcome of transactions every 3 s
(`transactionOpBatchInterval`), and delivers a message twice if it checks more often. And a message that is sent to the retry
topic of a group whose members lock their queues becomes a dead letter immediately; `rocketlet messages replay` and the
console therefore send such messages back as failed deliveries, which allows one attempt.
"""

OFFICIAL = "Official clients of 5.x"
EMPTY = """\
An empty cell is not tested, or the client lacks the feature: Rust's 5.0.0 has no push consumer, no recall and no TLS
settings. The first example in the documentation of each client works unchanged, except for the address: the broker creates a
topic at the first request for its route, and the topic accepts messages of all four types."""

GRPC = """\
## gRPC methods

Official clients of 5.x use gRPC, on the broker's own port: `pip install '.[broker]'`, `rocketlet start`, and
give the client that `host:port`. These methods of `apache.rocketmq.v2.MessagingService` are served.

| method | for |
|---|---|
| QueryRoute | all clients; creates a topic where sends may |
| QueryAssignment | push consumers |
| Telemetry, Heartbeat, NotifyClientTermination | all clients |
| SyncLiteSubscription | lite consumers of 5.5 |
| SendMessage, EndTransaction, RecallMessage | producers |
| ReceiveMessage, AckMessage, ChangeInvisibleDuration | push and simple consumers |
| ForwardMessageToDeadLetterQueue | push consumers in order |

Intended differences from Apache's proxy and broker, of which Apache's own tests of 5.5.0 show the last three:

- QueryRoute creates a topic that does not exist, so that a developer's first program works. Apache's proxy returns
  40402, even if its broker may create topics. With `autoCreateTopicEnable=false` (`mqadmin updateBrokerConfig`) this
  broker returns 40402, too.
- In an ordered group, a message that was acknowledged while an earlier one was not is redelivered with it. Such a
  message keeps its delivery attempt, because its consumer has handled it. Apache's broker counts another attempt.
- ChangeInvisibleDuration returns the handle that it got, which stays valid, because a popped message stays in its queue
  (decision 23). Apache's broker returns another handle, and the first one is no longer valid.
- RecallMessage of a message that was delivered or recalled, or never waited, is refused: 208 (NO_MESSAGE) in remoting.
  Apache's broker does not look for the message and returns success.
- A message of a topic of the type PRIORITY that is redelivered comes after the waiting messages of all levels, as on
  Apache's broker, but among redelivered messages the levels count. With the topic attribute
  `priority.retried.first=true`, which Apache's broker does not have, it comes before waiting messages of lower levels.

Properties of lite topics have a meaning only in messages of lite topics. What the broker does with them elsewhere:

| in | `__LITE_TOPIC` | `INNER_MULTI_DISPATCH`, `INNER_MULTI_QUEUE_OFFSET` |
|---|---|---|
| a message of a lite topic | names the lite topic | replaced |
| another message, also a delayed or half message | refused | kept without meaning |
| the same by gRPC, as a user property | 40007 | the first kept without meaning; the second 40007 |
| a batch | refused | kept without meaning |
| a message that is sent back, or sent to a retry topic | kept without meaning | kept without meaning |
| a replayed or mirrored message | left out | left out |

Clients of Apache's MQTT proxy write `INNER_MULTI_DISPATCH`, so it is never a reason to refuse a message. The broker
indexes the messages that a topic got since it was made LITE, so earlier messages never count as messages of lite topics.
A retry or dead-letter topic cannot be made LITE.
"""


def document(proofs: Proofs) -> str:
    parts = [INTRODUCTION]
    areas: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for area, text, client in proofs.features:
        areas[area][text].add(client)
    for area in sorted(areas):
        if area == OFFICIAL:
            parts.append(_by_client(areas[area]))
            continue
        parts.append(f"\n## {area}\n\n| | shown by |\n|---|---|\n")
        parts += [f"| {text} | {', '.join(sorted(areas[area][text]))} |\n" for text in sorted(areas[area])]
    parts.append(f"\n{GRPC}")
    parts.append("\n## Request codes\n\n| code | where | proven by |\n|---|---|---|\n")
    clients: dict[int, set[str]] = defaultdict(set)
    for code, client in proofs.requests:
        clients[code].add(client)
    parts += [f"| {code} {name} | {where} | {_proof(clients[code], code)} |\n" for code, name, where in rows()]
    parts.append("\n| not supported | the answer |\n|---|---|\n")
    parts += [f"| {codes} | {answer} |\n" for codes, answer in REFUSED.items()]
    return "".join(parts)


def _by_client(shown: dict[str, set[str]]) -> str:
    """The features of official clients of 5.x: a column for each client."""
    clients = sorted(set().union(*shown.values()))
    lines = [f"| | {' | '.join(clients)} |", f"|---{'|---' * len(clients)}|"]
    lines += [
        f"| {text} | {' | '.join('yes' if client in shown[text] else '' for client in clients)} |"
        for text in sorted(shown)
    ]
    return f"\n## {OFFICIAL}\n\n{EMPTY}\n\n" + "\n".join(lines) + "\n"


def _proof(clients: set[str], code: int) -> str:
    if code in OURS:
        return f"our own, for {OURS[code]}"
    return ", ".join(sorted(clients)) or "our own tests only"


def rows() -> list[tuple[int, str, str]]:
    """Code, name and where it is handled, of all that are supported."""
    where = dict.fromkeys((*BROKER_REQUESTS, *SENDS), "broker")
    for code in NAME_SERVER_REQUESTS:
        where[code] = "name server"
    for code in TO_CLIENT:
        where[code] = "broker to client"
    for code in (RequestCode.GET_CONSUMER_RUNNING_INFO, RequestCode.CONSUME_MESSAGE_DIRECTLY):
        where[code] = "broker, and to client"
    return [(int(code), RequestCode(code).name, where[code]) for code in sorted(where)]
