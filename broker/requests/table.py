"""Every request code that is answered, with its handler and the permission that the handler needs.

Another request is another line here, and one in docs/compatibility.md. `Dispatch` authorizes a request before it calls
its handler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...protocol.codes import RequestCode as Code
from ...protocol.frame import Frame
from ..broker import Broker
from ..nameserver import requests as nameserver
from ..nameserver.routes import Routes
from ..net.answers import Buffers
from ..net.connection import Connection
from ..permissions import Permission
from . import (
    admin,
    assignments,
    group_admin,
    membership,
    offsets,
    pulls,
    replies,
    searches,
    sends,
    topics,
    transactions,
)

BrokerHandler = Callable[[Broker, Connection, Frame], Buffers | None]
NameServerHandler = Callable[[Routes, Connection, Frame], Buffers | None]
"""Returns the buffers to write; None if it answers later or never. Raises `Refused` and what a client's request may cause."""

NONE, PUB, SUB, ADMIN, BROKER = (
    Permission.NONE,
    Permission.PUB,
    Permission.SUB,
    Permission.ADMIN,
    Permission.BROKER,
)

# These have no handler: they are staged one by one and committed together (`sends.Sends`).
SENDS: Mapping[int, Permission] = {
    Code.SEND_MESSAGE: PUB,
    Code.SEND_MESSAGE_V2: PUB,
    Code.SEND_BATCH_MESSAGE: PUB,
}
BROKER_REQUESTS: Mapping[int, tuple[BrokerHandler, Permission]] = {
    # messages
    Code.PULL_MESSAGE: (pulls.pull_message, SUB),
    Code.CONSUMER_SEND_MSG_BACK: (sends.send_back, SUB),
    Code.END_TRANSACTION: (transactions.end_transaction, PUB),
    Code.SEND_REPLY_MESSAGE: (replies.send_reply, PUB),
    Code.SEND_REPLY_MESSAGE_V2: (replies.send_reply, PUB),
    Code.QUERY_MESSAGE: (searches.query_message, SUB),
    Code.VIEW_MESSAGE_BY_ID: (searches.view_message, SUB),
    # membership
    Code.HEART_BEAT: (membership.heartbeat, SUB),
    Code.UNREGISTER_CLIENT: (membership.unregister_client, SUB),
    Code.GET_CONSUMER_LIST_BY_GROUP: (membership.consumer_list, SUB),
    Code.LOCK_BATCH_MQ: (membership.lock, SUB),
    Code.UNLOCK_BATCH_MQ: (membership.unlock, SUB),
    Code.CHECK_CLIENT_CONFIG: (membership.check_client, NONE),
    Code.QUERY_ASSIGNMENT: (assignments.query_assignment, SUB),
    # offsets
    Code.QUERY_CONSUMER_OFFSET: (offsets.query_consumer_offset, SUB),
    Code.UPDATE_CONSUMER_OFFSET: (offsets.update_consumer_offset, SUB),
    Code.SEARCH_OFFSET_BY_TIMESTAMP: (offsets.search_offset, NONE),
    Code.GET_MAX_OFFSET: (offsets.max_offset, NONE),
    Code.GET_MIN_OFFSET: (offsets.min_offset, NONE),
    Code.GET_EARLIEST_MSG_STORETIME: (offsets.earliest_store_time, NONE),
    Code.GET_QUEUE_OFFSETS: (offsets.queue_offsets, NONE),
    # topics
    Code.UPDATE_AND_CREATE_TOPIC: (topics.create_topic, ADMIN),
    Code.DELETE_TOPIC_IN_BROKER: (topics.delete_topic, ADMIN),
    Code.GET_ALL_TOPIC_CONFIG: (topics.all_topics, NONE),
    Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: (topics.system_topics, NONE),
    Code.GET_TOPIC_STATS_INFO: (topics.topic_stats, NONE),
    Code.QUERY_CONSUME_QUEUE: (topics.query_consume_queue, NONE),
    Code.CLEAN_UNUSED_TOPIC: (topics.clean_unused_topics, ADMIN),
    # groups
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: (group_admin.update_group, ADMIN),
    Code.DELETE_SUBSCRIPTIONGROUP: (group_admin.delete_group, ADMIN),
    Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: (group_admin.all_groups, NONE),
    Code.GET_ALL_CONSUMER_OFFSET: (group_admin.all_consumer_offsets, NONE),
    Code.GET_CONSUMER_CONNECTION_LIST: (group_admin.consumer_connections, NONE),
    Code.GET_CONSUME_STATS: (group_admin.consume_stats, NONE),
    Code.GET_BROKER_CONSUME_STATS: (group_admin.all_consume_stats, NONE),
    Code.QUERY_TOPIC_CONSUME_BY_WHO: (group_admin.consumed_by, NONE),
    Code.QUERY_CONSUME_TIME_SPAN: (group_admin.time_span, NONE),
    Code.QUERY_CORRECTION_OFFSET: (group_admin.correction_offset, NONE),
    Code.CLONE_GROUP_OFFSET: (group_admin.clone_offsets, ADMIN),
    Code.INVOKE_BROKER_TO_RESET_OFFSET: (group_admin.reset_offset, ADMIN),
    Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: (group_admin.consumer_status, NONE),
    Code.GET_CONSUMER_RUNNING_INFO: (group_admin.forward, NONE),
    Code.CONSUME_MESSAGE_DIRECTLY: (group_admin.forward, ADMIN),
    Code.GET_GROUP_HISTORY: (group_admin.group_history, NONE),
    # the broker
    Code.GET_BROKER_CONFIG: (admin.broker_config, NONE),
    Code.UPDATE_BROKER_CONFIG: (admin.update_broker_config, ADMIN),
    Code.GET_BROKER_RUNTIME_INFO: (admin.runtime_info, NONE),
    Code.VIEW_BROKER_STATS_DATA: (admin.view_stats, NONE),
    Code.GET_ALL_DELAY_OFFSET: (admin.all_delay_offsets, NONE),
    Code.CLEAN_EXPIRED_CONSUMEQUEUE: (admin.clean, ADMIN),
    Code.DELETE_EXPIRED_COMMITLOG: (admin.clean, ADMIN),
    Code.GET_PRODUCER_CONNECTION_LIST: (admin.producer_connections, NONE),
    Code.GET_ALL_PRODUCER_INFO: (admin.all_producers, NONE),
}
NAME_SERVER_REQUESTS: Mapping[int, tuple[NameServerHandler, Permission]] = {
    Code.REGISTER_BROKER: (nameserver.register_broker, BROKER),
    Code.UNREGISTER_BROKER: (nameserver.unregister_broker, BROKER),
    Code.QUERY_DATA_VERSION: (nameserver.data_version, BROKER),
    Code.GET_ROUTEINFO_BY_TOPIC: (nameserver.route, NONE),
    Code.GET_BROKER_CLUSTER_INFO: (nameserver.cluster, NONE),
    Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: (nameserver.topics, NONE),
    Code.GET_TOPICS_BY_CLUSTER: (nameserver.topics_of_cluster, NONE),
    Code.GET_SYSTEM_TOPIC_LIST_FROM_NS: (nameserver.system_topics, NONE),
    Code.GET_KV_CONFIG: (nameserver.get_kv, NONE),
    Code.GET_KVLIST_BY_NAMESPACE: (nameserver.kv_list, NONE),
    Code.GET_NAMESRV_CONFIG: (nameserver.config, NONE),
    Code.PUT_KV_CONFIG: (nameserver.put_kv, ADMIN),
    Code.DELETE_KV_CONFIG: (nameserver.delete_kv, ADMIN),
    Code.DELETE_TOPIC_IN_NAMESRV: (nameserver.delete_topic, ADMIN),
    Code.WIPE_WRITE_PERM_OF_BROKER: (nameserver.wipe_write, ADMIN),
    Code.ADD_WRITE_PERM_OF_BROKER: (nameserver.add_write, ADMIN),
}
