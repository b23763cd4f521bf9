"""Administration of a cluster, Rocketlet's or Apache's of 4.9 and 5.x: topics, groups, offsets, messages, brokers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any, Final, Self

from ...protocol import admin_answers, admin_bodies, bodies, group_config, names
from ...protocol.admin_answers import GroupConnections, MemberConnection, Running
from ...protocol.admin_bodies import Departed, Progress, decode_topic_stats
from ...protocol.bodies import BrokerData, TopicConfig
from ...protocol.codes import PERM_READ, PERM_WRITE, RequestCode, ResponseCode
from ...protocol.config import MAX_TOPIC_QUEUES
from ...protocol.counting import counted
from ...protocol.frame import Ext, Frame
from ...protocol.group_config import GroupConfig
from ...protocol.headers import (
    AccountName,
    AskMember,
    BrokerNameOnly,
    ConsumerGroup,
    ConsumeStats,
    CreateTopic,
    DepartedCount,
    GroupHistory,
    GroupName,
    PutAccount,
    ResetOffset,
    TopicName,
    UpdateOffset,
    WhiteAddresses,
    write,
)
from ...protocol.queue import Queue
from ...protocol.subscription import SQL92, TAG, Sql, parse_subscription
from ..config import ADMIN_TIMEOUT_S, CLIENT_LIMITS, TOPIC_QUEUES, ClientLimits
from ..errors import BrokerRefused, ConfigError, ConnectionFailed, RequestTimeout, TopicNotFound
from ..message import Message
from ..wire.access import Access
from ..wire.answers import body_of, header_of
from ..wire.cluster import Cluster
from ..wire.stored_since import stored_since
from . import message_search, replay
from .described import Group, Topic, are_broadcasting
from .offset_change import OffsetChange, To
from .ownership import locked

Masters = Mapping[str, str]
"""Addresses of masters by broker name."""

NO_EVENTS_MS: Final = (1 << 63) - 1  # none happens later


class AdminClient:
    """`async with AdminClient("host:port") as admin: print(await admin.topics())`

    Every method raises RocketletError: ConnectionFailed or RequestTimeout if a server is away, BrokerRefused if it does not
    know or allow the request.
    """

    def __init__(self, name_server: str, *, access: Access | None = None, limits: ClientLimits = CLIENT_LIMITS) -> None:
        self._cluster = Cluster(name_server, access, limits=limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._cluster.close()

    # Brokers

    async def brokers(self) -> list[BrokerData]:
        """The brokers that the name server knows, sorted by name."""
        answer = await self._cluster.ask_name_server(RequestCode.GET_BROKER_CLUSTER_INFO)
        return sorted(body_of(answer, bodies.decode_cluster), key=lambda broker: broker.name)

    async def departed(self) -> list[Departed]:
        """Brokers that the name server knew and that are gone. Apache's tells of none, and 4.9's would never answer
        GET_DEPARTED_BROKERS: only a name server that has some to tell of is asked for them."""
        known = await self._cluster.ask_name_server(RequestCode.GET_BROKER_CLUSTER_INFO)
        if not header_of(known, DepartedCount).departed:
            return []
        answer = await self._cluster.ask_name_server(RequestCode.GET_DEPARTED_BROKERS)
        return body_of(answer, admin_bodies.decode_departed)

    async def forget_broker(self, name: str) -> None:
        """A broker that is gone was retired for good. Tells every name server; raises BrokerRefused if none remembers it."""
        await self._cluster.tell_name_servers(RequestCode.FORGET_BROKER, write(BrokerNameOnly(name)))

    async def broker_status(self, address: str) -> dict[str, str]:
        """GET_BROKER_RUNTIME_INFO: version, boot time, rates, disk use; the names are Apache's."""
        return body_of(await self._ask(address, RequestCode.GET_BROKER_RUNTIME_INFO), admin_answers.decode_table)

    async def broker_config(self, address: str) -> dict[str, str]:
        """The settings of a broker by Apache's names, as text."""
        answer = await self._ask(address, RequestCode.GET_BROKER_CONFIG)
        return body_of(answer, admin_bodies.decode_properties)

    async def update_broker_config(self, address: str, settings: Mapping[str, str]) -> None:
        """Changes settings until the broker stops. BrokerRefused names those that cannot be changed."""
        await self._ask(address, RequestCode.UPDATE_BROKER_CONFIG, body=admin_bodies.encode_properties(settings))

    # Topics

    async def topics(self, *, system: bool = False) -> list[str]:
        """All topics. Those that RocketMQ makes for itself only if `system` is set."""
        answer = await self._cluster.ask_name_server(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        found = sorted(body_of(answer, bodies.decode_topic_list))
        if system:
            return found
        made = {
            text
            for broker in await self.brokers()
            for text in (broker.cluster, broker.name, names.reply_topic(broker.cluster))
        }
        return [name for name in found if name not in made and not names.is_made_by_brokers(name)]

    async def topic(self, name: str) -> Topic:
        """A topic's settings and offsets on each of its brokers. Raises TopicNotFound."""
        route = await self._cluster.find_route(name)
        if route is None:
            raise TopicNotFound(f"no name server knows the topic {name}; `rocketlet topics list` shows all")
        masters = {broker.name: broker.addresses[0] for broker in route.brokers if 0 in broker.addresses}
        queues = {data.broker_name: data for data in route.queues}
        stats = await self._each(masters, RequestCode.GET_TOPIC_STATS_INFO, write(TopicName(name)))
        ranges = {
            queue: item for answer in stats.values() for queue, item in body_of(answer, decode_topic_stats).items()
        }
        config = {
            broker: TopicConfig(name, data.read_queues, data.write_queues, data.perm, sys_flag=data.sys_flag)
            for broker, data in queues.items()
        }
        return Topic(name, config, dict(sorted(ranges.items())))

    async def create_topic(
        self,
        name: str,
        *,
        queues: int | None = None,
        perm: int | None = None,
        brokers: Iterable[str] | None = None,
    ) -> dict[str, TopicConfig]:
        """Create a topic on the brokers that do not have it, of all brokers or of those named. Return its settings there by
        the brokers' names.

        Brokers that have the topic keep their settings, which `change_topic` changes. Default `queues` and `perm`: those of
        the brokers that have the topic, or 4 queues that may be written and read if no broker has it.

        Raises:
            ConfigError: the topic's name, the number of queues or the name of a broker is invalid.
        """
        fault = names.topic_fault(name)
        if fault:
            raise ConfigError(f"topic: {fault}")
        route = await self._cluster.find_route(name)
        there = {data.broker_name: data for data in route.queues} if route is not None else {}
        if queues is None:
            queues = max((data.read_queues for data in there.values()), default=TOPIC_QUEUES)
        if perm is None:
            perm = reduce(or_, (data.perm for data in there.values())) if there else PERM_READ | PERM_WRITE
        _check_queues("queues", queues)
        missing = {broker: at for broker, at in (await self.masters(brokers)).items() if broker not in there}
        await self._each(missing, RequestCode.UPDATE_AND_CREATE_TOPIC, write(CreateTopic(name, queues, queues, perm)))
        return {broker: TopicConfig(name, queues, queues, perm) for broker in sorted(missing)}

    async def change_topic(
        self,
        name: str,
        *,
        queues: int | None = None,
        read_queues: int | None = None,
        perm: int | None = None,
        brokers: Iterable[str] | None = None,
        allow_unreadable: bool = False,
    ) -> dict[str, TopicConfig]:
        """Change those settings of a topic that are given. Return all of them by the brokers' names.

        Args:
            queues: the number of queues that producers send to.
            read_queues: the number of queues that consumers read, default `queues`. A topic gets fewer queues without loss in
                two steps: first `queues=4, read_queues=8`, then `read_queues=4` when its groups have read queues 4 to 7.
            perm: 6 to write and read, 4 to read only, 2 to write only.
            brokers: the names of the brokers, default all that have the topic.
            allow_unreadable: True to remove queues from the readable ones although messages are stored in them.

        Raises:
            TopicNotFound: no name server knows the topic.
            ConfigError: a value is invalid, or messages would become unreadable.
        """
        topic = await self.topic(name)
        masters = await self.masters(sorted(topic.config) if brokers is None else brokers)
        missing = sorted(set(masters) - set(topic.config))
        if missing:
            raise ConfigError(f"brokers: {', '.join(missing)} does not have the topic {name}; create it there first")
        changed = {broker: _changed(topic.config[broker], queues, read_queues, perm) for broker in masters}
        unreadable = topic.unreadable(changed)
        if unreadable and not allow_unreadable:
            count = counted(sum(unreadable.values()), "message")
            raise ConfigError(
                f"read_queues: {count} in {', '.join(map(str, unreadable))} would become unreadable; lower `queues` alone, "
                "wait until the groups have read these queues, then lower `read_queues` with allow_unreadable=True"
            )
        # Routes have neither filter type nor order, and 4.9's brokers, which do not know this request, lose both in any case.
        told = await self._each(
            masters,
            RequestCode.GET_TOPIC_CONFIG,
            write(TopicName(name)),
            ignored=(ResponseCode.REQUEST_CODE_NOT_SUPPORTED,),
        )
        kept = {broker: body_of(answer, admin_answers.decode_topic_config) for broker, answer in told.items()}
        for broker, config in changed.items():
            kind = kept.get(broker, config)
            header = CreateTopic(
                name,
                config.read_queues,
                config.write_queues,
                config.perm,
                kind.filter_type,
                config.sys_flag,
                kind.order,
            )
            await self._ask(masters[broker], RequestCode.UPDATE_AND_CREATE_TOPIC, write(header))
        return changed

    async def delete_topic(self, name: str) -> None:
        """Deletes a topic with its messages and offsets from every broker and from the name servers."""
        await self._each(await self.masters(), RequestCode.DELETE_TOPIC_IN_BROKER, write(TopicName(name)))
        await self._cluster.ask_name_server(RequestCode.DELETE_TOPIC_IN_NAMESRV, write(TopicName(name)))

    async def consumed_by(self, topic: str) -> list[str]:
        """The groups that subscribe to a topic or have committed in it."""
        code, ext = RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, write(TopicName(topic))
        answers = await self._each(await self.masters(), code, ext)
        return sorted(
            {name for answer in answers.values() for name in body_of(answer, admin_answers.decode_group_list)}
        )

    async def producers(self) -> dict[str, tuple[MemberConnection, ...]]:
        """Connected producers by group, if their brokers list them."""
        answers = await self._each(await self.masters(), RequestCode.GET_ALL_PRODUCER_INFO)
        found: dict[str, set[MemberConnection]] = {}
        for answer in answers.values():
            for group, members in body_of(answer, admin_answers.decode_all_producers).items():
                found.setdefault(group, set()).update(members)
        return {group: tuple(sorted(members)) for group, members in sorted(found.items())}

    # Groups

    async def groups(self, *, system: bool = False) -> list[str]:
        """All groups that a broker has settings for."""
        found = await self.all_group_configs()
        return sorted(name for name in found if system or not names.is_system_group(name))

    async def group(self, name: str) -> Group:
        """A group as all brokers know it. Raises ConfigError if none does."""
        masters = await self.masters()
        config, connections, progress = await asyncio.gather(
            self.group_configs(name, masters), self.connections(name, masters), self.progress(name, masters=masters)
        )
        if not config and not connections and not progress:
            raise ConfigError(f"no broker knows the group {name}; `rocketlet groups list` shows all")
        owners = await self._owners(name, masters, connections)
        return Group(name, config, connections, {} if are_broadcasting(connections) else progress, owners)

    async def group_configs(self, name: str, masters: Masters | None = None) -> dict[str, GroupConfig]:
        """A group's settings by broker name; empty if no broker has any."""
        return (await self.all_group_configs(masters)).get(name, {})  # 4.9 tells those of all groups, not of one

    async def all_group_configs(self, masters: Masters | None = None) -> dict[str, dict[str, GroupConfig]]:
        """The settings of all groups, by their name and the broker's."""
        answers = await self._each(await self._known(masters), RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
        found: dict[str, dict[str, GroupConfig]] = {}
        for broker, answer in answers.items():
            for name, config in body_of(answer, admin_answers.decode_groups).items():
                found.setdefault(name, {})[broker] = config
        return found

    async def connections(self, name: str, masters: Masters | None = None) -> dict[str, GroupConnections]:
        """The members by broker name; empty if nobody is connected."""
        answers = await self._each(
            await self._known(masters),
            RequestCode.GET_CONSUMER_CONNECTION_LIST,
            write(ConsumerGroup(name)),
            ignored=(ResponseCode.CONSUMER_NOT_ONLINE,),
        )
        return {
            broker: body_of(answer, admin_answers.decode_consumer_connections) for broker, answer in answers.items()
        }

    async def _owners(
        self, name: str, masters: Masters, connections: Mapping[str, GroupConnections]
    ) -> dict[Queue, str]:
        """The owner of each queue: the holder of its lock on Rocketlet's brokers, the member that says it reads it on
        Apache's."""
        owners = locked(await self.told(name, masters))
        if not owners:
            for client_id, member in (await self.running(name, masters, connections)).items():
                for queue in member.commit_offsets:
                    owners.setdefault(queue, client_id)
        return dict(sorted(owners.items()))

    async def running(
        self, group: str, masters: Masters | None = None, connections: Mapping[str, GroupConnections] | None = None
    ) -> dict[str, Running]:
        """Each connected member's report on itself, by client id, without those that do not answer."""
        masters = await self._known(masters)
        if connections is None:
            connections = await self.connections(group, masters)
        at = {member.client_id: masters[broker] for broker, known in connections.items() for member in known.members}

        async def one(client_id: str) -> Running | None:
            try:
                ext = write(AskMember(group, client_id))
                answer = await self._ask(at[client_id], RequestCode.GET_CONSUMER_RUNNING_INFO, ext)
            except (BrokerRefused, RequestTimeout):  # it has just left, or is of a kind that does not answer
                return None
            return body_of(answer, admin_answers.decode_running)

        found = await asyncio.gather(*map(one, at))
        return {client_id: item for client_id, item in zip(at, found, strict=True) if item is not None}

    async def history(self, group: str, masters: Masters | None = None, *, since_ms: int = 0) -> list[dict[str, Any]]:
        """A group's history on Rocketlet's brokers: members, owners, disagreements, and events since a time (ms since the
        epoch, by the broker's clock). Others refuse (BrokerRefused)."""
        header = write(GroupHistory(group, since_ms))
        answers = await self._each(await self._known(masters), RequestCode.GET_GROUP_HISTORY, header)
        return [body_of(answer, admin_answers.decode_report) for answer in answers.values()]

    async def told(self, group: str, masters: Masters) -> list[dict[str, Any]]:
        """Like `history`, without events and lag, and without brokers that tell nothing."""
        header, ignored = (
            write(GroupHistory(group, NO_EVENTS_MS, lag=False)),
            (ResponseCode.REQUEST_CODE_NOT_SUPPORTED,),
        )
        answers = await self._each(masters, RequestCode.GET_GROUP_HISTORY, header, ignored=ignored)
        return [body_of(answer, admin_answers.decode_report) for answer in answers.values()]

    async def create_group(self, config: GroupConfig) -> list[str]:
        """Create a group on the brokers that do not have it, and return their names.

        If no broker has it, it gets `config`. Otherwise the brokers that have it keep their settings, which `change_group`
        changes, and the others get a copy of them. Raises ConfigError if the group's name is invalid.
        """
        fault = names.group_fault(config.name)
        if fault:
            raise ConfigError(f"group: {fault}")
        masters = await self.masters()
        known = await self._group_tables(config.name, masters)
        missing = {broker: at for broker, at in masters.items() if broker not in known}
        body = group_config.encode_group(config)
        if known:
            body = group_config.encode_altered(known[min(known)], {})
        await self._each(missing, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)
        return sorted(missing)

    async def change_group(
        self,
        name: str,
        *,
        consume_enable: bool | None = None,
        retry_max_times: int | None = None,
        retry_queues: int | None = None,
        consume_orderly: bool | None = None,
        strict: bool | None = None,
    ) -> list[str]:
        """Change those settings of a group that are given, on the brokers that have the group, and return their names.

        Args:
            consume_enable: False to give its members no messages.
            retry_max_times: the number of retries before a message becomes a dead letter.
            retry_queues: the number of queues of its retry topic.
            consume_orderly: True to give clients that pop the messages of one message group in order.
            strict: True to refuse members whose subscriptions differ from the others'.

        Raises:
            ConfigError: no broker knows the group.
        """
        given = {
            "consume_enable": consume_enable,
            "retry_max_times": retry_max_times,
            "retry_queues": retry_queues,
            "consume_orderly": consume_orderly,
            "strict": strict,
        }
        changes = {field: value for field, value in given.items() if value is not None}
        masters = await self.masters()
        known = await self._group_tables(name, masters)
        if not known:
            raise ConfigError(f"no broker knows the group {name}; `rocketlet groups list` shows all")
        for broker, table in known.items():
            body = group_config.encode_altered(table, changes)
            await self._ask(masters[broker], RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)
        return sorted(known)

    async def _group_tables(self, name: str, masters: Masters) -> dict[str, dict[str, Any]]:
        """Return a group's settings as each broker has them, including fields that only later brokers have."""
        answers = await self._each(masters, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
        tables = {broker: body_of(answer, admin_answers.decode_group_tables) for broker, answer in answers.items()}
        return {broker: table[name] for broker, table in tables.items() if name in table}

    async def delete_group(self, name: str, *, offsets: bool = True) -> None:
        """Deletes a group's settings, and with `offsets` also its offsets."""
        header = write(GroupName(name, offsets))
        await self._each(await self.masters(), RequestCode.DELETE_SUBSCRIPTIONGROUP, header)

    # Offsets

    async def progress(
        self, group: str, topic: str = "", *, masters: Masters | None = None, times: bool = True
    ) -> dict[Queue, Progress]:
        """How far a group is in each queue of a topic. Default: of all topics in which it has committed. Without `times`,
        which cost a broker as much as all the rest, `last_ms` may be 0."""
        ext = write(ConsumeStats(group, topic, columns=True, times=times))
        answers = await self._each(
            await self._known(masters),
            RequestCode.GET_CONSUME_STATS,
            ext,
            ignored=(ResponseCode.SYSTEM_ERROR,),  # 4.9 refuses a group without settings so
        )
        found = [body_of(answer, admin_bodies.decode_consume_stats) for answer in answers.values()]
        return dict(sorted((queue, item) for table in found for queue, item in table.items()))

    async def preview_reset(self, group: str, topic: str, to: To) -> dict[Queue, OffsetChange]:
        """The changes that `reset` would make. Changes nothing."""
        return await self._changes(group, await self.topic(topic), to)

    async def _changes(self, group: str, topic: Topic, to: To) -> dict[Queue, OffsetChange]:
        before = await self._committed(group, topic.name)
        wanted = await self._wanted(topic, to)
        return {queue: OffsetChange(before.get(queue), offset) for queue, offset in sorted(wanted.items())}

    async def reset(self, group: str, topic: str, to: To) -> dict[Queue, OffsetChange]:
        """Sets a group's offsets. Connected members are told and continue from there; without members the offsets are stored.

        Raises ConfigError for single offsets while members are connected, because the protocol can tell them only a time, and
        for a group that no broker knows.
        """
        found = await self.topic(topic)
        changes = await self._changes(group, found, to)
        masters = await self.masters()
        online = await self.connections(group, masters)
        if not online and not any(change.before for change in changes.values()):
            await self.group(group)  # raises for a group that is not there: a mistyped name would become one
        if not online:
            for queue, change in changes.items():
                offset = write(UpdateOffset(group, topic, queue.queue_id, change.after))
                await self._ask(masters[queue.broker_name], RequestCode.UPDATE_CONSUMER_OFFSET, offset)
            return changes
        if isinstance(to, Mapping):
            raise ConfigError(f"the group {group} has members; stop them, or reset to a time, 'first' or 'last'")
        for name in sorted({queue.broker_name for queue in changes}):
            of_broker = {queue: change.after for queue, change in changes.items() if queue.broker_name == name}
            are_ends = all(offset == found.ranges[queue].end for queue, offset in of_broker.items())
            # Apache's brokers take the nearest message for a time, also the newest one for a time after it.
            time_ms = -1 if are_ends else _reset_time(to)
            header = write(ResetOffset(topic, group, time_ms, True, exact=True))
            await self._ask(masters[name], RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)
        return changes

    async def _committed(self, group: str, topic: str) -> dict[Queue, int]:
        progress = await self.progress(group, topic, times=False)
        return {queue: item.consumer_offset for queue, item in progress.items()}

    async def _wanted(self, topic: Topic, to: To) -> dict[Queue, int]:
        if isinstance(to, Mapping):
            for queue, offset in to.items():
                span = topic.ranges.get(queue)
                if span is None:
                    raise ConfigError(f"the topic {topic.name} has no queue {queue}")
                if not span.begin <= offset <= span.end:
                    raise ConfigError(f"{queue}: {offset} is outside of {span.begin} to {span.end}")
            return dict(to)
        if isinstance(to, int):
            found = await asyncio.gather(*(self._stored_at(queue, to) for queue in topic.ranges))
            return dict(zip(topic.ranges, found, strict=True))
        if to not in ("first", "last"):
            raise ConfigError(f"offsets are set to 'first', 'last', a time in ms or offsets by queue, not to {to!r}")
        return {queue: span.begin if to == "first" else span.end for queue, span in topic.ranges.items()}

    async def _stored_at(self, queue: Queue, time_ms: int) -> int:
        connection = await self._cluster.broker(queue.broker_name)
        return await stored_since(connection, queue, time_ms)

    # Messages

    async def message(self, message_id: str, topic: str = "") -> Message | None:
        """Finds a message by its offset id, or with `topic` by the id that its sender gave it. None if there is none."""
        if not topic:
            return await message_search.by_offset_id(self._cluster, message_id)
        found = await self.copies(message_id, topic)
        return found[0] if found else None

    async def copies(self, message_id: str, topic: str) -> list[Message]:
        """A topic's messages with the id that their sender gave them, oldest first: more than one if it was sent again."""
        return await message_search.by_key(
            self._cluster, topic, message_id, begin_ms=0, end_ms=message_search.FOREVER_MS, limit=32, unique=True
        )

    async def delay_offsets(self) -> dict[str, dict[int, int]]:
        """The offset of the first undelivered message of each delay level (from 1), by broker name."""
        told = await self._each(await self.masters(), RequestCode.GET_ALL_DELAY_OFFSET)
        return {name: body_of(answer, admin_answers.decode_delay_offsets) for name, answer in told.items()}

    async def offset_at(self, queue: Queue, time_ms: int) -> int:
        """The offset of the first message of a queue that was stored at a time or later (ms since the epoch); the queue's end
        if there is none."""
        if self._cluster.master(queue.broker_name) is None:
            await self._cluster.find_route(queue.topic)
        return await self._stored_at(queue, time_ms)

    async def messages_with_key(
        self, topic: str, key: str, *, begin_ms: int = 0, end_ms: int = message_search.FOREVER_MS, limit: int = 64
    ) -> list[Message]:
        """Finds messages with a key, oldest first: up to `limit` from each broker."""
        return await message_search.by_key(
            self._cluster, topic, key, begin_ms=begin_ms, end_ms=end_ms, limit=limit, unique=False
        )

    async def read(
        self, queue: Queue, begin: int, end: int, *, expression: str | Sql = "*"
    ) -> AsyncIterator[list[Message]]:
        """The messages of a queue from `begin` up to but not including `end` that match a filter, in pieces."""
        if self._cluster.master(queue.broker_name) is None:
            await self._cluster.find_route(queue.topic)
        kind = SQL92 if isinstance(expression, Sql) else TAG
        subscription = parse_subscription(queue.topic, expression, kind=kind)
        async for messages in message_search.read_queue(self._cluster, queue, begin, end, subscription):
            tags = subscription.tags
            yield [message for message in messages if not tags or message.tag in tags]

    async def send_again(self, message: Message, *, group: str | None = None) -> None:
        """Sends a stored message, such as a dead letter, to the topic that it was first sent to; with `group` only to that
        group. The stored message stays where it is. Apache's brokers of 5.x give `group` one try, after a second."""
        await replay.send_again(self._cluster, message, group)

    async def store(self, queue: Queue, body: bytes) -> None:
        """Stores a message in one queue, for administration. A `Producer` chooses among the queues that take messages."""
        await replay.store(self._cluster, queue, body)

    async def send_to_retry(self, message: Message, group: str) -> None:
        """Sends another cluster's message that waits to be tried again to the group here, with the tries that it has had."""
        await replay.send_to_retry(self._cluster, message, group)

    # Accounts

    async def accounts(self) -> dict[str, dict[str, Any]]:
        """Each broker's accounts without their secrets, and its addresses that need none, by broker name: the fields of
        plain_acl.yml. Apache's brokers of 4.9.8 and later tell nobody (BrokerRefused)."""
        answers = await self._each(await self.masters(), RequestCode.GET_BROKER_CLUSTER_ACL_CONFIG)
        return {name: body_of(answer, admin_answers.decode_accounts) for name, answer in answers.items()}

    async def put_account(self, account: PutAccount) -> None:
        """Creates an account on all brokers, or changes the fields that are given."""
        await self._each(await self.masters(), RequestCode.UPDATE_AND_CREATE_ACL_CONFIG, write(account))

    async def delete_account(self, access_key: str) -> None:
        """Deletes an account on all brokers."""
        await self._each(await self.masters(), RequestCode.DELETE_ACL_CONFIG, write(AccountName(access_key)))

    async def put_white_addresses(self, addresses: Sequence[str]) -> None:
        """Clients with these addresses need no account: `10.0.0.*`, `10.0.0.{1,2}`, `10.0.1-5.*`."""
        header = write(WhiteAddresses(",".join(addresses)))
        await self._each(await self.masters(), RequestCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG, header)

    # Asking

    async def _known(self, masters: Masters | None) -> Masters:
        return await self.masters() if masters is None else masters

    async def masters(self, named: Iterable[str] | None = None) -> dict[str, str]:
        """Addresses of masters by broker name: a caller that asks for much gives them to each request, so that the name
        server is asked once. Raises ConfigError for a name that it does not know, ConnectionFailed if it knows none."""
        known = {broker.name: broker.addresses[0] for broker in await self.brokers() if 0 in broker.addresses}
        if not known:  # without a broker, nothing would be done and nothing said
            raise ConnectionFailed("the name servers know no broker; start one, or wait until it has registered")
        wanted = known if named is None else list(named)
        missing = [name for name in wanted if name not in known]
        if missing:
            raise ConfigError(f"no broker is named {', '.join(missing)}; known: {', '.join(known)}")
        return {name: known[name] for name in wanted}

    async def _each(
        self,
        masters: Mapping[str, str],
        code: int,
        ext: Ext | None = None,
        body: bytes = b"",
        *,
        ignored: tuple[int, ...] = (),
    ) -> dict[str, Frame]:
        """The answers of brokers that are asked side by side; without those whose refusal is `ignored`."""

        async def one(address: str) -> Frame | None:
            try:
                return await self._ask(address, code, ext, body)
            except BrokerRefused as error:
                if error.code in ignored:
                    return None
                raise

        found = await asyncio.gather(*map(one, masters.values()))
        return {name: answer for name, answer in zip(masters, found, strict=True) if answer is not None}

    async def _ask(self, address: str, code: int, ext: Ext | None = None, body: bytes = b"") -> Frame:
        connection = await self._cluster.connection(address)
        return await connection.request(code, ext or {}, body, timeout_s=ADMIN_TIMEOUT_S)


def _check_queues(option: str, count: int) -> None:
    """Raises ConfigError. Apache's brokers take any number, but clients could not read the route of such a topic."""
    if not 1 <= count <= MAX_TOPIC_QUEUES:
        raise ConfigError(f"{option} is {count}; expected 1 to {MAX_TOPIC_QUEUES} for each broker")


def _changed(config: TopicConfig, queues: int | None, read_queues: int | None, perm: int | None) -> TopicConfig:
    """Return the settings with the given ones changed. Raises ConfigError."""
    write_queues = config.write_queues
    if queues is not None:
        _check_queues("queues", queues)
        write_queues = queues
        read_queues = queues if read_queues is None else read_queues
    if read_queues is not None:
        _check_queues("read_queues", read_queues)
        if read_queues < write_queues:
            raise ConfigError(
                f"read_queues is {read_queues} and producers send to {write_queues} queues; messages in the others would "
                "not be delivered: lower `queues`, too"
            )
    return replace(
        config,
        write_queues=write_queues,
        read_queues=config.read_queues if read_queues is None else read_queues,
        perm=config.perm if perm is None else perm,
    )


def _reset_time(to: str | int) -> int:
    """RESET's time: -1 is the end."""
    return to if isinstance(to, int) else 0 if to == "first" else -1
