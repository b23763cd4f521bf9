"""`AdminClient`: topics, groups, offsets, messages and brokers of a cluster, Rocketlet's or Apache's."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from operator import or_
from types import MappingProxyType
from typing import Any, Final, Literal, Self, TypeVar, Unpack

from ...protocol import admin_bodies, bodies, names
from ...protocol.admin_bodies import (
    Departed,
    GroupConnections,
    LiteGroupLag,
    LiteParent,
    LiteTopicLag,
    MemberConnection,
    QueueProgress,
    Range,
    Running,
    decode_topic_stats,
)
from ...protocol.allocation import CONSISTENT_HASH
from ...protocol.bodies import (
    LITE_BIND,
    NO_DEDUP,
    NO_RATE,
    BrokerData,
    GroupConfig,
    TopicConfig,
)
from ...protocol.codes import PERM_READ, PERM_WRITE, RequestCode, ResponseCode
from ...protocol.frame import Ext, Frame
from ...protocol.headers import (
    AccountName,
    AskMember,
    BrokerNameOnly,
    ConsumerGroupHeader,
    ConsumeStats,
    CreateTopic,
    DepartedCount,
    GroupHistory,
    GroupName,
    LiteClientOf,
    LiteGroupOf,
    LiteTopicOf,
    PutAccount,
    ResetOffset,
    RunningInfoParts,
    TopicName,
    UpdateOffset,
    ViewStats,
    WhiteAddresses,
    write,
)
from ...protocol.names import Queue, Sql, counted, parse_subscription
from ...protocol.settings import (
    TOPIC_SETTINGS,
    GroupSettings,
    NewTopicSettings,
    TopicSettings,
    Value,
    changed_topic,
    encode_group_change,
    topic_attributes,
)
from ..config import (
    ADMIN_TIMEOUT_S,
    CLIENT_LIMITS,
    SUSPECTS,
    TOPIC_QUEUES,
    ClientLimits,
)
from ..errors import (
    AnswerUnreadable,
    BrokerRefused,
    ChangeIncomplete,
    ConfigError,
    ConnectionFailed,
    RequestTimeout,
    RocketletError,
    TopicNotFound,
    get_logger,
)
from ..message import Message
from ..wire.cluster import ClusterView, stored_since
from ..wire.connection import Access, body_of, gather_limited, header_of
from .messages import FOREVER_MS, by_key, by_offset_id, read_queue, send_again, send_to_retry, store

# ------------------------------------------------------------------------------
# Administration of a cluster, Rocketlet's or Apache's of 4.9 and 5.x: topics, groups, offsets, messages, brokers.


T = TypeVar("T")

log = get_logger("rocketlet.admin")

Masters = Mapping[str, str]
"""Addresses of masters by broker name."""

_NOT_LITE: Final = (
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED,  # a broker older than 5.5
    ResponseCode.TOPIC_NOT_EXIST,
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
    ResponseCode.INVALID_PARAMETER,  # a topic without lite topics, or a group that is not bound
)
NO_EVENTS_MS: Final = (1 << 63) - 1  # later than any possible event, so that no event is returned


class AdminClient:
    """A client for administration: `async with AdminClient("host:port") as admin: print(await admin.topics())`

    Methods that send requests raise RocketletError, such as ConnectionFailed or RequestTimeout if a server is
    unreachable or does not respond, and BrokerRefused if it rejects the request.
    """

    def __init__(self, name_server: str, *, access: Access | None = None, limits: ClientLimits = CLIENT_LIMITS) -> None:
        self._cluster = ClusterView(name_server, access, limits=limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._cluster.close()

    # Brokers

    async def brokers(self) -> list[BrokerData]:
        """Return the brokers that the name server knows, sorted by name."""
        answer = await self._cluster.ask_name_server(RequestCode.GET_BROKER_CLUSTER_INFO)
        return sorted(body_of(answer, bodies.decode_cluster), key=lambda broker: broker.name)

    async def departed(self) -> list[Departed]:
        """Return brokers that were registered at the name server and are not registered any more. Apache's name servers
        report none.

        GET_DEPARTED_BROKERS is sent only if the name server announces such brokers, because name servers of 4.9 do not
        respond to this request.
        """
        known = await self._cluster.ask_name_server(RequestCode.GET_BROKER_CLUSTER_INFO)
        if not header_of(known, DepartedCount).departed:
            return []
        answer = await self._cluster.ask_name_server(RequestCode.GET_DEPARTED_BROKERS)
        return body_of(answer, admin_bodies.decode_departed)

    async def forget_broker(self, name: str) -> None:
        """Remove a permanently retired broker from the name servers that respond. Raises BrokerRefused if none of them
        remembers it."""
        await self._cluster.tell_name_servers(RequestCode.FORGET_BROKER, write(BrokerNameOnly(name)))

    async def broker_status(self, address: str) -> dict[str, str]:
        """Return the broker's runtime information (GET_BROKER_RUNTIME_INFO): version, boot time, rates, disk use, under
        Apache's names."""
        return body_of(await self._ask(address, RequestCode.GET_BROKER_RUNTIME_INFO), admin_bodies.decode_table)

    async def broker_config(self, address: str) -> dict[str, str]:
        """Return the settings of a broker as text, under Apache's names."""
        answer = await self._ask(address, RequestCode.GET_BROKER_CONFIG)
        return body_of(answer, admin_bodies.decode_properties)

    async def update_broker_config(self, address: str, settings: Mapping[str, str]) -> None:
        """Change settings of a broker. A Rocketlet broker keeps them until it stops; Apache's also writes them to its file.
        Raises BrokerRefused if there are settings that cannot be changed, which a Rocketlet broker names."""
        await self._ask(address, RequestCode.UPDATE_BROKER_CONFIG, body=admin_bodies.encode_properties(settings))

    # Topics

    async def topics(self, *, system: bool = False) -> list[str]:
        """Return all topics, without RocketMQ's internal ones unless `system` is True."""
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
        """Return a topic's settings on each of its brokers, and its offsets on those with a registered master. Raises
        TopicNotFound."""
        route = await self._cluster.find_route(name)
        if route is None:
            raise TopicNotFound(f"no name server knows the topic {name}; `rocketlet topics list` shows all")
        masters = {broker.name: broker.addresses[0] for broker in route.brokers if 0 in broker.addresses}
        queues = {data.broker_name: data for data in route.queues}
        stats = await self._each(masters, RequestCode.GET_TOPIC_STATS_INFO, decode_topic_stats, write(TopicName(name)))
        ranges = dict(chain.from_iterable(table.items() for table in stats.values()))
        config = {
            broker: TopicConfig(name, data.read_queues, data.write_queues, data.perm, sys_flag=data.sys_flag)
            for broker, data in queues.items()
        }
        return Topic(name, config, dict(sorted(ranges.items())))

    async def create_topic(
        self, name: str, *, brokers: Iterable[str] | None = None, **settings: Unpack[NewTopicSettings]
    ) -> dict[str, TopicConfig]:
        """Create a topic on all brokers, or on the named ones, that do not have it. Return its settings there by broker
        name. Brokers that have the topic keep their settings, which `change_topic` changes.

        Args:
            settings: settings by their names, such as `message_type="FIFO"`; docs/reference/administration.md lists them.
                Default `queues` and `perm`: the most queues and all permissions that brokers have for the topic, or 4
                queues that may be written and read if no broker has it.

        Raises:
            ConfigError: the topic's name, a setting, or the name of a broker is invalid, there is no such setting, or a
                broker does not support `dedup`.
        """
        fault = names.topic_fault(name)
        unset = [
            key for key, default in (("message_type", ""), ("retried_first", False)) if settings.get(key) == default
        ]
        given = _checked_topic({key: value for key, value in settings.items() if key not in unset}, NewTopicSettings)
        for setting, kind in (("lite_expiration_min", "LITE"), ("retried_first", "PRIORITY")):
            if given.get(setting) and given.get("message_type") != kind:
                got = settings.get("message_type", "")
                raise ConfigError(f"{setting}: expected message_type='{kind}', got {got!r}")
        if fault:
            raise ConfigError(f"topic: {fault}")
        route = await self._cluster.find_route(name)
        there = {data.broker_name: data for data in route.queues} if route is not None else {}
        queues = settings.get("queues")
        if queues is None:
            queues = max((data.read_queues for data in there.values()), default=TOPIC_QUEUES)
        perm = settings.get("perm")
        if perm is None:
            perm = reduce(or_, (data.perm for data in there.values())) if there else PERM_READ | PERM_WRITE
        missing = {broker: at for broker, at in (await self.masters(brokers)).items() if broker not in there}
        await self._check_dedup(given, missing)
        header = CreateTopic(name, queues, queues, perm, attributes=topic_attributes(given))
        await self._change(missing, RequestCode.UPDATE_AND_CREATE_TOPIC, dict.fromkeys(missing, (write(header), b"")))
        config = changed_topic(TopicConfig(name, queues, queues, perm), None, header.attributes)
        return dict.fromkeys(sorted(missing), config)

    async def change_topic(
        self,
        name: str,
        *,
        brokers: Iterable[str] | None = None,
        allow_unreadable: bool = False,
        **settings: Unpack[TopicSettings],
    ) -> dict[str, TopicConfig]:
        """Change settings of a topic. Return the resulting settings by broker name.

        Args:
            brokers: the names of the brokers, default all that have the topic.
            allow_unreadable: True to remove queues from the readable ones although messages are stored in them.
            settings: new values by their names, such as `queues=8`; docs/reference/administration.md lists them. Without
                `read_queues`, consumers read `queues`. A topic gets fewer queues without loss in two steps: first
                `queues=4, read_queues=8`, and when its groups have read queues 4 to 7,
                `read_queues=4, allow_unreadable=True`.

        Raises:
            TopicNotFound: no name server knows the topic.
            ConfigError: a value is invalid, there is no such setting, or messages would become unreadable.
        """
        given = _checked_topic(settings, TopicSettings)
        topic = await self.topic(name)
        masters = await self.masters(sorted(topic.config) if brokers is None else brokers)
        missing = sorted(set(masters) - set(topic.config))
        if missing:
            raise ConfigError(f"brokers: {', '.join(missing)} does not have the topic {name}; create it there first")
        changed = {broker: _changed(topic.config[broker], settings) for broker in masters}
        unreadable = topic.unreadable(changed)
        if unreadable and not allow_unreadable:
            count = counted(sum(unreadable.values()), "message")
            raise ConfigError(
                f"read_queues: {count} in {', '.join(map(str, unreadable))} would become unreadable; lower `queues` alone, "
                "wait until the groups have read these queues, then lower `read_queues` with allow_unreadable=True"
            )
        await self._check_dedup(given, masters)
        kept = await self.topic_settings(name, masters)
        requests: dict[str, tuple[Ext, bytes]] = {}
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
                attributes=topic_attributes(given),
            )
            requests[broker] = write(header), b""
            changed[broker] = changed_topic(config, kind, header.attributes)
        await self._change(masters, RequestCode.UPDATE_AND_CREATE_TOPIC, requests)
        return changed

    async def _check_dedup(self, given: Mapping[str, Value], masters: Masters) -> None:
        if given.get("dedup", NO_DEDUP) != NO_DEDUP:
            await self._check_own("dedup", _NO_DEDUP, masters)

    async def delete_topic(self, name: str) -> None:
        """Delete a topic from all brokers and name servers. The brokers delete its messages, and Rocketlet's also its
        offsets."""
        await self._change_all(RequestCode.DELETE_TOPIC_IN_BROKER, write(TopicName(name)))
        await self._cluster.tell_name_servers(RequestCode.DELETE_TOPIC_IN_NAMESRV, write(TopicName(name)))

    async def _check_own(self, setting: str, effect: str, masters: Masters) -> None:
        """Raise ConfigError for brokers that do not have a setting of Rocketlet's. Apache's would ignore it silently.

        Args:
            effect: what such a broker does instead, and what to do
        """
        for broker, address in masters.items():
            if not (await self.broker_status(address)).get("rocketletVersion"):
                raise ConfigError(f"{setting}: the broker {broker} is not a Rocketlet, and {effect}")

    async def topic_settings(self, name: str, masters: Masters | None = None) -> dict[str, TopicConfig]:
        """Return a topic's settings, including those that routes do not have, by broker name. Brokers of 4.9 do not know this
        request, and lose these settings in any case."""
        ignored = (ResponseCode.REQUEST_CODE_NOT_SUPPORTED, ResponseCode.TOPIC_NOT_EXIST)
        decode = admin_bodies.decode_topic_config
        return await self._each(masters, RequestCode.GET_TOPIC_CONFIG, decode, write(TopicName(name)), ignored=ignored)

    async def message_type(self, topic: str) -> str:
        """Return the type of message that a topic is for, such as PRIORITY; empty if no broker has a type for it."""
        found = await self.topic_settings(topic)
        return next((config.message_type for config in found.values() if config.message_type), "")

    async def put_bytes_per_s(self, topic: str) -> float | None:
        """Return the bytes per second that were sent to a topic in the last minute; None if no broker counts them, as
        Apache's brokers before the first message since their start."""
        code, ext = RequestCode.VIEW_BROKER_STATS_DATA, write(ViewStats("TOPIC_PUT_SIZE", topic))
        rates = await self._each(None, code, admin_bodies.decode_rate, ext, ignored=(ResponseCode.SYSTEM_ERROR,))
        return sum(rates.values()) if rates else None

    async def consumed_by(self, topic: str) -> list[str]:
        """Return the groups that subscribe to a topic, pop it, or have committed offsets in it."""
        code, ext = RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, write(TopicName(topic))
        found = await self._each(None, code, admin_bodies.decode_group_list, ext)
        return sorted(set(chain.from_iterable(found.values())))

    async def producers(self) -> dict[str, tuple[MemberConnection, ...]]:
        """Return the connected producers by group, as far as brokers list them."""
        found: dict[str, set[MemberConnection]] = {}
        tables = await self._each(None, RequestCode.GET_ALL_PRODUCER_INFO, admin_bodies.decode_all_producers)
        for table in tables.values():
            for group, members in table.items():
                found.setdefault(group, set()).update(members)
        return {group: tuple(sorted(members)) for group, members in sorted(found.items())}

    # Groups

    async def groups(self, *, system: bool = False) -> list[str]:
        """Return the groups for which a broker has settings, without RocketMQ's internal ones unless `system` is True."""
        found = await self.all_group_configs()
        return sorted(name for name in found if system or not names.is_system_group(name))

    async def group(self, name: str) -> Group:
        """Return a group as described by all brokers. Raises ConfigError if no broker knows it."""
        masters = await self.masters()
        config, connections, progress = await asyncio.gather(
            self.group_configs(name, masters), self.connections(name, masters), self.progress(name, masters=masters)
        )
        if not config and not connections and not progress:
            raise ConfigError(f"no broker knows the group {name}; `rocketlet groups list` shows all")
        owners = await self._owners(name, masters, connections)
        return Group(name, config, connections, {} if are_broadcasting(connections) else progress, owners)

    async def group_configs(self, name: str, masters: Masters | None = None) -> dict[str, GroupConfig]:
        """Return a group's settings by broker name; empty if no broker has any."""
        # brokers of 4.9 cannot return the settings of a single group
        return (await self.all_group_configs(masters)).get(name, {})

    async def all_group_configs(self, masters: Masters | None = None) -> dict[str, dict[str, GroupConfig]]:
        """Return the settings of all groups, by group and broker name."""
        found: dict[str, dict[str, GroupConfig]] = {}
        code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
        for broker, table in (await self._each(masters, code, admin_bodies.decode_groups)).items():
            for name, config in table.items():
                found.setdefault(name, {})[broker] = config
        return found

    async def connections(self, name: str, masters: Masters | None = None) -> dict[str, GroupConnections]:
        """Return the group's members by broker name; empty if no member is connected."""
        return await self._each(
            masters,
            RequestCode.GET_CONSUMER_CONNECTION_LIST,
            admin_bodies.decode_consumer_connections,
            write(ConsumerGroupHeader(name)),
            ignored=(ResponseCode.CONSUMER_NOT_ONLINE,),
        )

    async def _owners(
        self, name: str, masters: Masters, connections: Mapping[str, GroupConnections]
    ) -> dict[Queue, str]:
        """Return the known owners of queues: the holders of their locks if a Rocketlet broker reports any, otherwise the
        members that report the queues."""
        owners = locked(await self.group_report(name, masters))
        if not owners:
            for client_id, member in (await self.running(name, masters, connections)).items():
                for queue in member.commit_offsets:
                    owners.setdefault(queue, client_id)
        return dict(sorted(owners.items()))

    async def running(
        self,
        group: str,
        masters: Masters | None = None,
        connections: Mapping[str, GroupConnections] | None = None,
        *,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> dict[str, Running]:
        """Query the running info of each connected member, and return it by client id. Members that do not respond, or
        whose response cannot be decoded, are left out.

        Args:
            timeout_s: the maximum time to wait for a member's response.
        """
        masters = await self._known(masters)
        if connections is None:
            connections = await self.connections(group, masters)
        at = {member.client_id: masters[broker] for broker, known in connections.items() for member in known.members}

        async def one(client_id: str) -> Running | None:
            try:
                ext = {**write(AskMember(group, client_id)), **write(RunningInfoParts(stacks=True))}
                answer = await self._ask(at[client_id], RequestCode.GET_CONSUMER_RUNNING_INFO, ext, timeout_s=timeout_s)
            except (BrokerRefused, RequestTimeout):  # the member has just left, or does not support the request
                return None
            try:
                return body_of(answer, admin_bodies.decode_running)
            except AnswerUnreadable as error:
                log.warning("running_info_unreadable", group=group, client=client_id, reason=str(error))
                return None

        found = await asyncio.gather(*map(one, at))
        return {client_id: item for client_id, item in zip(at, found, strict=True) if item is not None}

    async def history(self, group: str, masters: Masters | None = None, *, since_ms: int = 0) -> list[dict[str, Any]]:
        """Return reports about a group from Rocketlet's brokers: members, owners, conflicts, and events since `since_ms`
        (ms since the epoch, by the broker's clock). Raises BrokerRefused for other brokers."""
        header = write(GroupHistory(group, since_ms))
        found = await self._each(masters, RequestCode.GET_GROUP_HISTORY, admin_bodies.decode_report, header)
        return list(found.values())

    async def group_report(self, group: str, masters: Masters) -> list[dict[str, Any]]:
        """Return reports like `history`, without events and lag, and without brokers that do not support them."""
        code, header = RequestCode.GET_GROUP_HISTORY, write(GroupHistory(group, NO_EVENTS_MS, lag=False))
        ignored = (ResponseCode.REQUEST_CODE_NOT_SUPPORTED,)
        found = await self._each(masters, code, admin_bodies.decode_report, header, ignored=ignored)
        return list(found.values())

    # Lite topics

    async def lite_parent(self, topic: str) -> LiteParent | None:
        """Return the number of lite topics of a parent topic, their expiration and their groups. Return None for a topic
        that is not the parent of lite topics, or if no broker supports them."""
        code, decode = RequestCode.GET_PARENT_TOPIC_INFO, admin_bodies.decode_lite_parent
        found = list((await self._each(None, code, decode, write(TopicName(topic)), ignored=_NOT_LITE)).values())
        if not found:
            return None
        groups = {name for item in found for name in item.groups}
        return LiteParent(sum(item.lite_topics for item in found), found[0].expiration_min, tuple(sorted(groups)))

    async def lite_group(self, name: str, masters: Masters | None = None, *, most: int = SUSPECTS) -> LiteGroup | None:
        """Return the messages that a lite group has not finished. Return None for a group that is not bound to a parent
        topic, or if no broker supports lite topics.

        Args:
            most: the maximum number of lite topics that each broker lists.
        """
        code, header = RequestCode.GET_LITE_GROUP_INFO, write(LiteGroupOf(name, top_k=most))
        lags = await self._each(masters, code, admin_bodies.decode_lite_lag, header, ignored=_NOT_LITE)
        return LiteGroup(lags) if lags else None

    async def lite_subscriptions(
        self, group: str, topic: str, client_ids: Iterable[str], masters: Masters | None = None
    ) -> dict[str, int]:
        """Return to how many lite topics of a parent topic each of these members is subscribed, by client id. Members that
        no broker knows are left out."""
        masters = await self._known(masters)

        async def count(client_id: str) -> int:
            code, header = RequestCode.GET_LITE_CLIENT_INFO, write(LiteClientOf(topic, group, client_id, max_count=1))
            counts = await self._each(masters, code, admin_bodies.decode_lite_client, header, ignored=_NOT_LITE)
            return max(counts.values(), default=-1)

        ids = list(client_ids)
        found = await gather_limited(count, ids)
        return {client_id: number for client_id, number in zip(ids, found, strict=True) if number >= 0}

    async def lite_subscribers(
        self, topic: str, lite_topic: str, masters: Masters | None = None
    ) -> set[tuple[str, str]]:
        """Return the client id and the group of each member that is subscribed to a lite topic."""
        code, header = RequestCode.GET_LITE_TOPIC_INFO, write(LiteTopicOf(topic, lite_topic))
        found = await self._each(masters, code, admin_bodies.decode_lite_subscribers, header, ignored=_NOT_LITE)
        return set(chain.from_iterable(found.values()))

    # Changes of groups

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
        if config.has_rate:
            await self._check_own("rate", _NO_RATE, missing)
        table = known[min(known)] if known else {}
        body = bodies.encode_new_group(bodies.read_group(table) if known else config, table)
        await self._change(missing, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, dict.fromkeys(missing, ({}, body)))
        return sorted(missing)

    async def change_group(
        self, name: str, *, lite: Literal[False] | None = None, **changes: Unpack[GroupSettings]
    ) -> list[str]:
        """Change settings of a group on the brokers that have the group, and return their names.

        Args:
            lite: False to make a lite group a group of topics, for example if a stray lite consumer was its first member.
                Brokers refuse this while its clients have unfinished messages of lite topics.
            changes: new values of settings by their names, such as `retry_max_times=3`; docs/reference/values.md lists them.

        Raises:
            ConfigError: no broker knows the group, or there is no such setting.
        """
        _check_known(changes, (*GroupSettings.__annotations__, "lite"))
        masters = await self.masters()
        known = await self._group_tables(name, masters)
        if not known:
            raise ConfigError(f"no broker knows the group {name}; `rocketlet groups list` shows all")
        if changes.get("rate", NO_RATE) != NO_RATE:
            await self._check_own("rate", _NO_RATE, {broker: masters[broker] for broker in known})
        removed = (LITE_BIND,) if lite is False else ()
        requests: dict[str, tuple[Ext, bytes]] = {
            broker: ({}, encode_group_change(table, changes, removed)) for broker, table in known.items()
        }
        await self._change(masters, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, requests)
        return sorted(known)

    async def _group_tables(self, name: str, masters: Masters) -> dict[str, dict[str, Any]]:
        """Return a group's settings as each broker has them, including fields that only later brokers have."""
        code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
        tables = await self._each(masters, code, admin_bodies.decode_group_tables)
        return {broker: table[name] for broker, table in tables.items() if name in table}

    async def delete_group(self, name: str, *, offsets: bool = True, dead_letters: bool = False) -> int:
        """Delete a group's settings and its retry topic, so that a new group of the name gets none of its retries. Return the
        number of dead letters that are kept.

        On Apache's brokers, retries that wait for their time are stored in the retry topic when the time has come.

        Args:
            offsets: True to delete its offsets, too.
            dead_letters: True to delete its dead-letter topic even if the topic contains messages.
        """
        await self.delete_topic(names.retry_topic(name))
        count = await self.dead_letter_count(name)
        if count is not None and (dead_letters or not count):
            await self.delete_topic(names.dlq_topic(name))
            count = 0
        # The settings are last, so that tools still know the group if one of the steps before has failed.
        await self._change_all(RequestCode.DELETE_SUBSCRIPTIONGROUP, write(GroupName(name, offsets)))
        return count or 0

    async def dead_letter_count(self, group: str) -> int | None:
        """Return the number of a group's stored dead letters; None if it has no dead-letter topic."""
        try:
            ranges = (await self.topic(names.dlq_topic(group))).ranges
        except TopicNotFound:
            return None
        return sum(span.end - span.begin for span in ranges.values())

    # Offsets

    async def progress(
        self, group: str, topic: str = "", *, masters: Masters | None = None, times: bool = True
    ) -> dict[Queue, QueueProgress]:
        """Return a group's progress by queue, without brokers that respond with a system error.

        Args:
            topic: the topic. Default: all topics in which the group has committed offsets.
            times: False to leave out `last_ms`, which costs a broker as much as the rest of the request.
        """
        ext = write(ConsumeStats(group, topic, columns=True, times=times))
        ignored = (ResponseCode.SYSTEM_ERROR,)  # brokers of 4.9 respond like this for a group without settings
        decode = admin_bodies.decode_consume_stats
        found = await self._each(masters, RequestCode.GET_CONSUME_STATS, decode, ext, ignored=ignored)
        return dict(sorted(chain.from_iterable(table.items() for table in found.values())))

    async def preview_reset(self, group: str, topic: str, to: To) -> dict[Queue, OffsetChange]:
        """Return the changes that `reset` would make, without making them."""
        return await self._changes(group, await self.topic(topic), to)

    async def _changes(self, group: str, topic: Topic, to: To) -> dict[Queue, OffsetChange]:
        before = await self._committed(group, topic.name)
        wanted = await self._wanted(topic, to)
        return {queue: OffsetChange(before.get(queue), offset) for queue, offset in sorted(wanted.items())}

    async def reset(self, group: str, topic: str, to: To) -> dict[Queue, OffsetChange]:
        """Reset a group's offsets in a topic, and return the changes.

        Connected members are notified and continue from the new offsets. Without members, the offsets are only stored.

        Raises TopicNotFound, and ConfigError for an invalid `to`, for single offsets while members are connected, because
        the protocol supports only a time then, and for a group that no broker knows.
        """
        found = await self.topic(topic)
        changes = await self._changes(group, found, to)
        masters = await self.masters()
        online = await self.connections(group, masters)
        if not online and not any(change.before for change in changes.values()):
            # raises for an unknown group, because a reset with a mistyped name would create one
            await self.group(group)
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
            # Apache's brokers use the message nearest to a time, even if that is the newest one, which was stored before
            # it.
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
        """Return a message by its offset id, or with `topic` by the sender's message id. Return None if there is none."""
        if not topic:
            return await by_offset_id(self._cluster, message_id)
        found = await self.copies(message_id, topic)
        return found[0] if found else None

    async def copies(self, message_id: str, topic: str) -> list[Message]:
        """Return up to 32 messages of each broker with this sender's message id, oldest first. There can be several,
        because producers resend messages after errors."""
        return await by_key(self._cluster, topic, message_id, begin_ms=0, end_ms=FOREVER_MS, limit=32, unique=True)

    async def delay_offsets(self) -> dict[str, dict[int, int]]:
        """Return the offset of the first undelivered message of each delay level (from 1), by broker name."""
        return await self._each(None, RequestCode.GET_ALL_DELAY_OFFSET, admin_bodies.decode_delay_offsets)

    async def offset_at(self, queue: Queue, time_ms: int) -> int:
        """Return the offset of the first message of a queue that was stored at `time_ms` (ms since the epoch) or later; the
        end of the queue if there is none."""
        if self._cluster.master(queue.broker_name) is None:
            await self._cluster.find_route(queue.topic)
        return await self._stored_at(queue, time_ms)

    async def messages_with_key(
        self, topic: str, key: str, *, begin_ms: int = 0, end_ms: int = FOREVER_MS, limit: int = 64
    ) -> list[Message]:
        """Return messages with a key, oldest first, up to `limit` of each broker."""
        return await by_key(self._cluster, topic, key, begin_ms=begin_ms, end_ms=end_ms, limit=limit, unique=False)

    async def read(
        self, queue: Queue, begin: int, end: int, *, expression: str | Sql = "*"
    ) -> AsyncIterator[list[Message]]:
        """Iterate over the messages of a queue from offset `begin` to before `end` that match a filter, in lists."""
        if self._cluster.master(queue.broker_name) is None:
            await self._cluster.find_route(queue.topic)
        subscription = parse_subscription(queue.topic, expression)
        async for messages in read_queue(self._cluster, queue, begin, end, subscription):
            tags = subscription.tags
            yield [message for message in messages if not tags or message.tag in tags]

    async def send_again(self, message: Message, *, group: str | None = None) -> None:
        """Resend a stored message, such as a dead letter, to the topic that it was first sent to, or with `group` only
        to that group.

        The stored message stays in its topic. Apache's brokers of 5.x give `group` only one attempt, after a second.
        """
        await send_again(self._cluster, message, group)

    async def store(self, queue: Queue, body: bytes) -> None:
        """Store a message in any queue, for administration. A `Producer` sends only to writable queues."""
        await store(self._cluster, queue, body)

    async def send_to_retry(self, message: Message, group: str) -> None:
        """Send another cluster's pending retry to the group at this cluster, with its number of attempts."""
        await send_to_retry(self._cluster, message, group)

    # Accounts

    async def accounts(self) -> dict[str, dict[str, Any]]:
        """Return each broker's accounts without secrets, and the addresses that need no account, by broker name. The
        fields are those of plain_acl.yml. Apache's brokers of 4.9.8 and later reject this (BrokerRefused)."""
        return await self._each(None, RequestCode.GET_BROKER_CLUSTER_ACL_CONFIG, admin_bodies.decode_accounts)

    async def put_account(self, account: PutAccount) -> None:
        """Create an account on all brokers, or change the given fields and `admin` of an existing one."""
        await self._change_all(RequestCode.UPDATE_AND_CREATE_ACL_CONFIG, write(account))

    async def delete_account(self, access_key: str) -> None:
        """Delete an account on all brokers."""
        await self._change_all(RequestCode.DELETE_ACL_CONFIG, write(AccountName(access_key)))

    async def put_white_addresses(self, addresses: Sequence[str]) -> None:
        """Set the addresses of clients that need no account, such as `10.0.0.*`, `10.0.0.{1,2}` and `10.0.1-5.*`."""
        header = write(WhiteAddresses(",".join(addresses)))
        await self._change_all(RequestCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG, header)

    # Requests to brokers

    async def _known(self, masters: Masters | None) -> Masters:
        return await self.masters() if masters is None else masters

    async def masters(self, named: Iterable[str] | None = None) -> dict[str, str]:
        """Return addresses of masters by broker name. A caller with many requests passes them to each, so that the name
        server is queried only once.

        Raises ConfigError for an unknown name, and ConnectionFailed if the name server knows no broker.
        """
        known = {broker.name: broker.addresses[0] for broker in await self.brokers() if 0 in broker.addresses}
        if not known:  # otherwise a request without a broker would silently do nothing
            raise ConnectionFailed("the name servers know no broker; start one, or wait until it has registered")
        wanted = known if named is None else list(named)
        missing = [name for name in wanted if name not in known]
        if missing:
            raise ConfigError(f"no broker is named {', '.join(missing)}; known: {', '.join(known)}")
        return {name: known[name] for name in wanted}

    async def _each(
        self,
        masters: Masters | None,
        code: int,
        decode: Callable[[bytes], T],
        ext: Ext | None = None,
        *,
        ignored: tuple[int, ...] = (),
    ) -> dict[str, T]:
        """Send a request to brokers, by default to all, concurrently. Return the decoded bodies of the responses by broker
        name, without error codes that are `ignored`."""
        masters = await self._known(masters)

        async def one(address: str) -> Frame | None:
            try:
                return await self._ask(address, code, ext)
            except BrokerRefused as error:
                if error.code in ignored:
                    return None
                raise

        found = await asyncio.gather(*map(one, masters.values()))
        return {
            name: body_of(answer, decode) for name, answer in zip(masters, found, strict=True) if answer is not None
        }

    async def _change_all(self, code: int, ext: Ext) -> None:
        """Send the same change to all masters. Raises the errors of `_change`."""
        masters = await self.masters()
        await self._change(masters, code, dict.fromkeys(masters, (ext, b"")))

    async def _change(self, masters: Masters, code: int, requests: Mapping[str, tuple[Ext, bytes]]) -> None:
        """Send a change to brokers concurrently. `requests` has header and body by broker name. Raises ChangeIncomplete if
        only some brokers made the change, and the error of the first broker if none did."""
        answers = await asyncio.gather(
            *(self._ask(masters[broker], code, ext, body) for broker, (ext, body) in requests.items()),
            return_exceptions=True,
        )
        failed: dict[str, RocketletError] = {}
        for broker, answer in zip(requests, answers, strict=True):
            if isinstance(answer, RocketletError):
                failed[broker] = answer
            elif isinstance(answer, BaseException):
                raise answer
        if failed:
            done = [broker for broker in requests if broker not in failed]
            raise ChangeIncomplete(done, failed) if done else next(iter(failed.values()))

    async def _ask(
        self, address: str, code: int, ext: Ext | None = None, body: bytes = b"", *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> Frame:
        connection = await self._cluster.connection(address)
        return await connection.request(code, ext or {}, body, timeout_s=timeout_s)


_NO_DEDUP: Final = "stores repeated sends again; leave it out, and let consumers skip handled ids (`once`)"
_NO_RATE: Final = "hands out messages as fast as members read; lower the concurrency of the members instead"


def _checked_topic(settings: Mapping[str, Any], known: type[NewTopicSettings]) -> dict[str, Value]:
    """Return the settings of a topic that have a value. Raise ConfigError for an invalid or unknown one. Apache's brokers
    accept any number of queues, but clients could not decode the route then."""
    _check_known(settings, known.__annotations__)
    given = {name: value for name, value in settings.items() if value is not None}
    rows = [row for row in TOPIC_SETTINGS if row.argument in given]
    fault = next(filter(None, (row.fault(given[row.argument], row.argument) for row in rows)), None)
    if fault:
        raise ConfigError(fault)
    return given


def _check_known(settings: Mapping[str, object], known: Collection[str]) -> None:
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        raise ConfigError(f"{unknown[0]}: no such setting; use {', '.join(known)}")


def _changed(config: TopicConfig, settings: TopicSettings) -> TopicConfig:
    """Return the settings with the given queues and permission. Raises ConfigError."""
    write_queues = config.write_queues
    queues, read_queues, perm = settings.get("queues"), settings.get("read_queues"), settings.get("perm")
    if queues is not None:
        write_queues = queues
        read_queues = queues if read_queues is None else read_queues
    if read_queues is not None and read_queues < write_queues:
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
    """Return the time for the request RESET, in which -1 is the end."""
    return to if isinstance(to, int) else 0 if to == "first" else -1


# ------------------------------------------------------------------------------
# Topics and groups as AdminClient returns them.


def are_broadcasting(connections: Mapping[str, GroupConnections]) -> bool:
    """Return True if a group's members are broadcasting: each gets every message and keeps its own offsets. Committed
    offsets at brokers then date from a time when the group was not broadcasting."""
    return bool(connections) and all(known.message_model == "BROADCASTING" for known in connections.values())


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic.

    Attributes:
        config: the settings by broker name.
        ranges: the range of stored offsets by queue.
    """

    name: str
    config: Mapping[str, TopicConfig]
    ranges: Mapping[Queue, Range]

    @property
    def messages(self) -> int:
        return sum(item.end - item.begin for item in self.ranges.values())

    def unreadable(self, config: Mapping[str, TopicConfig]) -> dict[Queue, int]:
        """Return the number of stored messages of each queue that is readable now and would not be with `config`."""
        return {
            queue: span.end - span.begin
            for queue, span in self.ranges.items()
            if span.end > span.begin
            and queue.broker_name in config
            and config[queue.broker_name].read_queues <= queue.queue_id < self.config[queue.broker_name].read_queues
        }


@dataclass(frozen=True, slots=True)
class Group:
    """A consumer group.

    Attributes:
        config: the settings by broker name.
        connections: the connected members and their subscriptions by broker name; empty if no member is connected.
        progress: the progress by queue in all topics with committed offsets; empty for a broadcasting group.
        owners: the client id of the owner by queue.
    """

    name: str
    config: Mapping[str, GroupConfig]
    connections: Mapping[str, GroupConnections]
    progress: Mapping[Queue, QueueProgress]
    owners: Mapping[Queue, str]

    @property
    def members(self) -> tuple[MemberConnection, ...]:
        """The members, each only once even if several brokers know it."""
        found = {item.client_id: item for known in self.connections.values() for item in known.members}
        return tuple(found[name] for name in sorted(found))

    @property
    def lag(self) -> int:
        """The number of messages that are not consumed yet."""
        return sum(max(item.lag, 0) for item in self.progress.values())


@dataclass(frozen=True, slots=True)
class LiteGroup:
    """The messages that a lite group has not finished, in the lite topics that it has read or that its members are
    subscribed to; for a wildcard group, in all of the parent topic.

    Attributes:
        lags: the messages by broker name. A lite topic is on one broker.
    """

    lags: Mapping[str, LiteGroupLag]

    @property
    def topic(self) -> str:
        """The parent topic."""
        return next(iter(self.lags.values())).topic

    @property
    def is_wildcard(self) -> bool:
        """True if members receive from every lite topic."""
        return any(lag.is_wildcard for lag in self.lags.values())

    @property
    def messages(self) -> int:
        return sum(lag.messages for lag in self.lags.values())

    @property
    def in_flight(self) -> int:
        return sum(lag.in_flight for lag in self.lags.values())

    @property
    def oldest_ms(self) -> int | None:
        """The store time of the oldest of the messages, in ms since the epoch; None if there is none."""
        return min((lag.oldest_ms for lag in self.lags.values() if lag.oldest_ms), default=None)

    @property
    def longest(self) -> list[LiteTopicLag]:
        """The lite topics with most messages, most first."""
        found = [item for lag in self.lags.values() for item in lag.longest]
        return sorted(found, key=lambda item: (-item.messages, item.name))


# ------------------------------------------------------------------------------
# Offset resets.


To = Literal["first", "last"] | int | Mapping[Queue, int]
"""The target of a reset: the first message, the end, a store time in ms since the epoch, or an offset for each queue."""


@dataclass(frozen=True, slots=True)
class OffsetChange:
    """The effect of a reset on a queue, which skips or repeats messages. `before` is None if the group has no offset
    there."""

    before: int | None
    after: int

    @property
    def skipped(self) -> int:
        return max(self.after - (self.before or 0), 0)

    @property
    def repeated(self) -> int:
        return max((self.before or 0) - self.after, 0)


# ------------------------------------------------------------------------------
# The owners of queues over time, and changes of owners. Owners and changes are derived from the events that Rocketlet's
# brokers keep, or with Apache's brokers from repeated observations.
#
# An event is `{"ms", "event", "client", "broker", ...}`, with `topic`, `queue` and `epoch` if it is about a lease. Each
# lease has one owner: it starts with `locked` and ends with one of `ENDS`.


GroupEvent = Mapping[str, Any]

ENDS: Final = frozenset(("unlocked", "lock lost", "lock expired"))
CAUSES: Final = frozenset(("joined", "left", "leaving", "closed", "expired", "subscribed"))
"""Events that make a group rebalance."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """One ownership of a queue (`broker:number`) by a member, from `begin_ms` to `end_ms`. `begin_ms` is 0 if it started
    before the first known event."""

    queue: str
    owner: str
    begin_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """A change of a queue's owner. Times are in ms since the epoch, or None for events that have not happened.

    - `cause`, `cause_client`, `cause_ms`: the preceding change of the group, such as `joined`. Empty if unknown.
    - `end`: the end of the previous owner's lease: `unlocked` (released), `lock lost` (its connection closed) or `lock
      expired`.
    """

    queue: Queue
    before: str
    after: str
    end: str
    ended_ms: int
    locked_ms: int
    cause: str = ""
    cause_client: str = ""
    cause_ms: int | None = None
    pulled_ms: int | None = None
    committed_ms: int | None = None

    @property
    def took_ms(self) -> int:
        """The time in ms from the cause, or if unknown from the end of the previous lease, to the new lease."""
        return self.locked_ms - (self.ended_ms if self.cause_ms is None else self.cause_ms)


def locked(reports: Iterable[Mapping[str, Any]]) -> dict[Queue, str]:
    """Return the owner's client id by queue, from the reports of Rocketlet's brokers about a group."""
    return {
        Queue(item["topic"], item["brokerName"], item["queueId"]): str(item["clientId"])
        for report in reports
        for item in report["owners"]
    }


def changes(before: Mapping[Queue, str], after: Mapping[Queue, str], ms: int) -> list[dict[str, Any]]:
    """Return events derived from two observations of the owners of queues, for brokers that report no events. The
    events have the time of the second observation. The epoch of these events is 0."""
    ended = [("unlocked", queue, owner) for queue, owner in before.items() if after.get(queue) != owner]
    begun = [("locked", queue, owner) for queue, owner in after.items() if before.get(queue) != owner]
    return [
        {
            "ms": ms, "event": event, "client": owner, "topic": queue.topic, "broker": queue.broker_name,
            "queue": queue.queue_id, "epoch": 0,
        }
        for event, queue, owner in (*ended, *begun)
    ]  # fmt: skip


def ownerships(
    events: Sequence[GroupEvent], topic: str, now_ms: int, owners: Mapping[Queue, str] = MappingProxyType({})
) -> list[Ownership]:
    """Return the ownerships of a topic's queues, oldest first.

    Args:
        events: the brokers' events, each with the broker's name, oldest first.
        owners: the present owners, for leases that are older than the first event.
    """
    open_since: dict[tuple[str, int], Ownership] = {}
    done: list[Ownership] = []
    for event in events:
        if event.get("topic") != topic or "epoch" not in event:
            continue
        queue = f"{event['broker']}:{event['queue']}"
        key = (queue, int(event["epoch"]))
        if event["event"] == "locked":
            open_since[key] = Ownership(queue, str(event["client"]), int(event["ms"]), now_ms)
        elif event["event"] in ENDS:
            begun = open_since.pop(key, Ownership(queue, str(event["client"]), 0, now_ms))
            done.append(replace(begun, end_ms=int(event["ms"])))
    told = {item.queue for item in open_since.values()}
    for queue_now, owner in owners.items():
        name = f"{queue_now.broker_name}:{queue_now.queue_id}"
        if queue_now.topic == topic and name not in told:
            begin_ms = max((item.end_ms for item in done if item.queue == name), default=0)
            done.append(Ownership(name, owner, begin_ms, now_ms))
    return done + list(open_since.values())


def hand_overs(events: Sequence[GroupEvent]) -> list[HandOver]:
    """Return the changes of queues' owners, oldest first. If the previous owner acquires a queue again, that is not a
    change."""
    ended: dict[Queue, GroupEvent] = {}
    newest: dict[Queue, int] = {}
    found: list[HandOver] = []
    causes: dict[str, list[GroupEvent]] = {}
    for event in events:
        if event["event"] in CAUSES:
            causes.setdefault(str(event["broker"]), []).append(event)
        queue = _queue(event)
        if queue is None:
            continue
        if event["event"] in ENDS:
            ended[queue] = event
        elif event["event"] == "locked" and (before := ended.pop(queue, None)) is not None:
            newest.pop(queue, None)
            if before["client"] != event["client"]:
                newest[queue] = len(found)
                found.append(_hand_over(queue, before, event, causes.get(str(event["broker"]), [])))
        elif event["event"] in ("first pull", "first commit") and queue in newest:
            at = newest[queue]
            if event["client"] == found[at].after:
                found[at] = _with_first(found[at], event)
    return found


def _with_first(known: HandOver, event: GroupEvent) -> HandOver:
    if event["event"] == "first pull":
        return replace(known, pulled_ms=int(event["ms"]))
    return replace(known, committed_ms=int(event["ms"]))


def _hand_over(queue: Queue, before: GroupEvent, locked: GroupEvent, causes: Sequence[GroupEvent]) -> HandOver:
    ended_ms = int(before["ms"])
    found = HandOver(
        queue, str(before["client"]), str(locked["client"]), str(before["event"]), ended_ms, int(locked["ms"])
    )
    cause = next(_causing(causes, ended_ms), None)
    if cause is None:
        return found
    return replace(found, cause=str(cause["event"]), cause_client=str(cause["client"]), cause_ms=int(cause["ms"]))


def _causing(causes: Sequence[GroupEvent], ended_ms: int) -> Iterator[GroupEvent]:
    """Return the changes of the group before the end of a lease, newest first. A closed connection has the same time as
    the end of its leases, so changes in the same ms are included."""
    return (event for event in reversed(causes) if int(event["ms"]) <= ended_ms)


def _queue(event: GroupEvent) -> Queue | None:
    if "topic" not in event or "queue" not in event:
        return None
    return Queue(str(event["topic"]), str(event["broker"]), int(event["queue"]))


# ------------------------------------------------------------------------------
# `rebalanced` waits until a group has finished its rebalance, for tests and deployments.


LOOK_S = 0.05
_EVEN: Final = frozenset(("AVG", "AVG_BY_CIRCLE", "STICKY", ""))  # empty for Apache's clients, which do not report it


Look = Callable[[], Awaitable[list[dict[str, Any]]]]
"""Returns reports about a group from all brokers of a cluster, as `AdminClient.history` does."""


async def rebalanced(
    name_server: str,
    group: str,
    *,
    members: int | None = None,
    timeout_s: float = 30.0,
    access: Access | None = None,
    limits: ClientLimits = CLIENT_LIMITS,
) -> dict[str, int]:
    """Wait until a group has finished its rebalance. Return the number of queues of each member by client id.

    A rebalance is finished if each queue has one owner, no member is leaving, no queue is being drained, and the
    members' shares of each topic differ by at most one queue. With CONSISTENT_HASH, the shares must be those of that
    strategy. With other strategies than AVG, AVG_BY_CIRCLE and STICKY, the sizes of shares are not checked. A member
    may learn of its last queue a moment after the broker, so `await consumer.assigned()` before you use its queues.
    `rebalanced` needs Rocketlet's brokers, because Apache's do not report owners.

    - `members`: the number of members that the group must have as well.

    Raises TimeoutError with the missing condition, and RocketletError.
    """
    async with AdminClient(name_server, access=access, limits=limits) as admin:
        return await rebalanced_by(lambda: admin.history(group), group, members=members, timeout_s=timeout_s)


async def rebalanced_by(look: Look, group: str, *, members: int | None, timeout_s: float) -> dict[str, int]:
    """Wait like `rebalanced`, with the reports that `look` returns."""
    missing = "no broker responded"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                reports = await look()
                if not reports:
                    raise RocketletError("the name server knows no broker")
                missing, owned = _judged(reports, members)
                if not missing:
                    return owned
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise TimeoutError(f"the group {group} is not rebalanced after {timeout_s} s: {missing}") from None


def _is_hashed(owned_by: Mapping[Queue, str], clients: Sequence[str]) -> bool:
    """Return True if CONSISTENT_HASH allocates each queue of a topic to its owner."""
    queues = sorted(owned_by)
    return all(
        owned_by[queue] == client for client in clients for queue in CONSISTENT_HASH.allocate(client, queues, clients)
    )


def _judged(reports: list[dict[str, Any]], members: int | None) -> tuple[str, dict[str, int]]:
    """Return why the group is not rebalanced (empty if it is), and the number of queues of each member."""
    subscriptions = {item["clientId"]: item["subscriptions"] for report in reports for item in report["members"]}
    if members is not None and len(subscriptions) != members:
        return f"it has {counted(len(subscriptions), 'member')}", {}
    if not subscriptions:
        return "it has no members", {}
    leaving = [item["clientId"] for report in reports for item in report["members"] if item["leaving"]]
    if leaving:
        return f"{leaving[0]} is leaving", {}
    if any(report.get("draining") for report in reports):
        return "members from Apache's clients still handle messages of queues that move", {}
    strategies = {item["clientId"]: item["strategy"] for report in reports for item in report["members"]}
    owned_by: dict[Queue, str] = {}
    shares: dict[str, Counter[str]] = {}
    for report in reports:
        owners = {(item["topic"], item["queueId"]): item["clientId"] for item in report["owners"]}
        for topic, count in report["queues"].items():
            for number in range(count):
                owner = owners.get((topic, number))
                if owner is None or owner not in subscriptions:
                    return f"{topic}@{report['broker']}:{number} has no owner", {}
                shares.setdefault(topic, Counter())[owner] += 1
                owned_by[Queue(topic, report["broker"], number)] = owner
    for topic, share in shares.items():
        clients = names.sorted_ids([client for client, topics in subscriptions.items() if topic in topics])
        used = {strategies[client] for client in clients}
        counts = [share[client] for client in clients]
        if used <= _EVEN and max(counts) - min(counts) > 1:
            return f"the shares of {topic} are {sorted(counts)}", {}
        if used == {CONSISTENT_HASH.name} and not _is_hashed(
            {queue: owner for queue, owner in owned_by.items() if queue.topic == topic}, clients
        ):
            return f"the shares of {topic} are not those of CONSISTENT_HASH yet", {}
    return "", {client: sum(share[client] for share in shares.values()) for client in subscriptions}
