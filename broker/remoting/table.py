"""Every request code that is answered, with its handler and its rule of permission.

Another request is another line here, and one in docs/compatibility.md. `Dispatch` authorizes a request before it calls
its handler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...protocol.codes import RequestCode as Code
from ...protocol.frame import Frame
from ..broker import Broker
from ..nameserver.routes import Routes
from . import rules
from .answers import Reply
from .connection import Connection
from .requests import (
    accounts,
    admin,
    agreement,
    assignments,
    group_admin,
    membership,
    monitoring,
    offsets,
    pops,
    pulls,
    recalls,
    replies,
    searches,
    sends,
    topics,
    transactions,
)
from .requests import name_server as nameserver
from .rules import ADMIN, KNOWN, Rule

BrokerHandler = Callable[[Broker, Connection, Frame], Reply]
NameServerHandler = Callable[[Routes, Connection, Frame], Reply]
"""Raises `Refused` and what a client's request may cause."""

# These are staged one by one and committed together (`sends.Sends`), but batches of very many messages (`sends.store_batch`).
SENDS: Mapping[int, Rule] = {
    Code.SEND_MESSAGE: rules.SEND,
    Code.SEND_MESSAGE_V2: rules.SEND_V2,
    Code.SEND_BATCH_MESSAGE: rules.SEND_V2,
}
BROKER_REQUESTS: Mapping[int, tuple[BrokerHandler, Rule]] = {
    # messages
    Code.PULL_MESSAGE: (pulls.pull_message, rules.READS),
    Code.LITE_PULL_MESSAGE: (pulls.pull_message, rules.READS),
    Code.POP_MESSAGE: (pops.pop_message, rules.READS),
    Code.ACK_MESSAGE: (pops.ack_message, rules.READS),
    Code.BATCH_ACK_MESSAGE: (pops.batch_ack_message, rules.BATCH_ACK),
    Code.CHANGE_MESSAGE_INVISIBLETIME: (pops.change_invisible_time, rules.READS),
    Code.NOTIFICATION: (pops.notification, rules.READS),
    Code.POLLING_INFO: (pops.polling_info, rules.READS),
    Code.PEEK_MESSAGE: (pops.peek_message, rules.READS),
    Code.CONSUMER_SEND_MSG_BACK: (sends.send_back, rules.SEND_BACK),
    Code.RECALL_MESSAGE: (recalls.recall_message, rules.SEND),
    Code.END_TRANSACTION: (transactions.end_transaction, rules.END_TRANSACTION),
    Code.SEND_REPLY_MESSAGE: (replies.send_reply, KNOWN),
    Code.SEND_REPLY_MESSAGE_V2: (replies.send_reply, KNOWN),
    Code.QUERY_MESSAGE: (searches.query_message, rules.READS_TOPIC),
    Code.VIEW_MESSAGE_BY_ID: (searches.view_message, rules.VIEW),
    # membership
    Code.HEART_BEAT: (membership.heartbeat, rules.HEARTBEAT),
    Code.UNREGISTER_CLIENT: (membership.unregister_client, rules.OF_GROUP),
    Code.AGREE_ON_MEMBERS: (agreement.agree_on_members, ADMIN),
    Code.CONFIRM_WORD: (agreement.confirm_word, ADMIN),
    Code.GET_CONSUMER_LIST_BY_GROUP: (membership.consumer_list, rules.OF_GROUP),
    Code.LOCK_BATCH_MQ: (membership.lock, rules.LOCKS),
    Code.UNLOCK_BATCH_MQ: (membership.unlock, rules.LOCKS),
    Code.CHECK_CLIENT_CONFIG: (membership.check_client, rules.CLIENT_CHECK),
    Code.QUERY_ASSIGNMENT: (assignments.query_assignment, rules.ASSIGNMENT),
    Code.SET_MESSAGE_REQUEST_MODE: (pops.set_request_mode, ADMIN),
    Code.GET_ALL_MESSAGE_REQUEST_MODE: (pops.request_modes, ADMIN),
    # offsets
    Code.QUERY_CONSUMER_OFFSET: (offsets.query_consumer_offset, rules.READS),
    Code.UPDATE_CONSUMER_OFFSET: (offsets.update_consumer_offset, rules.READS),
    Code.SEARCH_OFFSET_BY_TIMESTAMP: (offsets.search_offset, rules.MAY_KNOW_TOPIC),
    Code.GET_MAX_OFFSET: (offsets.max_offset, rules.MAY_KNOW_TOPIC),
    Code.GET_MIN_OFFSET: (offsets.min_offset, rules.MAY_KNOW_TOPIC),
    Code.GET_EARLIEST_MSG_STORETIME: (offsets.earliest_store_time, rules.MAY_KNOW_TOPIC),
    Code.GET_QUEUE_OFFSETS: (offsets.queue_offsets, rules.EXTENTS),
    # topics
    Code.UPDATE_AND_CREATE_TOPIC: (topics.create_topic, ADMIN),
    Code.DELETE_TOPIC_IN_BROKER: (topics.delete_topic, ADMIN),
    Code.GET_ALL_TOPIC_CONFIG: (topics.all_topics, ADMIN),
    Code.GET_TOPIC_CONFIG: (topics.one_topic, rules.MAY_KNOW_TOPIC),
    Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: (topics.system_topics, ADMIN),
    Code.GET_TOPIC_STATS_INFO: (topics.topic_stats, rules.MAY_KNOW_TOPIC),
    Code.QUERY_CONSUME_QUEUE: (topics.query_consume_queue, rules.READS),
    Code.CLEAN_UNUSED_TOPIC: (topics.clean_unused_topics, ADMIN),
    # groups
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: (group_admin.update_group, ADMIN),
    Code.DELETE_SUBSCRIPTIONGROUP: (group_admin.delete_group, ADMIN),
    Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: (group_admin.all_groups, ADMIN),
    Code.GET_SUBSCRIPTIONGROUP_CONFIG: (group_admin.one_group, rules.GROUP),
    Code.GET_ALL_CONSUMER_OFFSET: (group_admin.all_consumer_offsets, ADMIN),
    Code.GET_CONSUMER_CONNECTION_LIST: (group_admin.consumer_connections, rules.OF_GROUP),
    Code.GET_CONSUME_STATS: (group_admin.consume_stats, rules.READS),
    Code.GET_BROKER_CONSUME_STATS: (group_admin.all_consume_stats, ADMIN),
    Code.QUERY_TOPIC_CONSUME_BY_WHO: (group_admin.consumed_by, rules.READS_TOPIC),
    Code.QUERY_CONSUME_TIME_SPAN: (group_admin.time_span, rules.OF_GROUP_AND_TOPIC),
    Code.QUERY_CORRECTION_OFFSET: (group_admin.correction_offset, rules.CORRECTION),
    Code.CLONE_GROUP_OFFSET: (group_admin.clone_offsets, rules.CLONE),
    Code.INVOKE_BROKER_TO_RESET_OFFSET: (group_admin.reset_offset, rules.OF_GROUP_AND_TOPIC),
    Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: (group_admin.consumer_status, rules.OF_GROUP_AND_TOPIC),
    Code.GET_CONSUMER_RUNNING_INFO: (group_admin.forward, rules.OF_GROUP),
    Code.CONSUME_MESSAGE_DIRECTLY: (group_admin.forward, ADMIN),
    Code.GET_GROUP_HISTORY: (group_admin.group_history, rules.OF_GROUP),
    # the broker
    Code.GET_BROKER_CONFIG: (admin.broker_config, ADMIN),
    Code.UPDATE_BROKER_CONFIG: (admin.update_broker_config, ADMIN),
    Code.GET_BROKER_RUNTIME_INFO: (monitoring.runtime_info, ADMIN),
    Code.VIEW_BROKER_STATS_DATA: (monitoring.view_stats, ADMIN),
    Code.GET_ALL_DELAY_OFFSET: (admin.all_delay_offsets, ADMIN),
    Code.CLEAN_EXPIRED_CONSUMEQUEUE: (admin.clean, ADMIN),
    Code.DELETE_EXPIRED_COMMITLOG: (admin.clean, ADMIN),
    Code.IDENTIFY: (accounts.identify, KNOWN),
    Code.UPDATE_AND_CREATE_ACL_CONFIG: (accounts.put_account, ADMIN),
    Code.DELETE_ACL_CONFIG: (accounts.delete_account, ADMIN),
    Code.GET_BROKER_CLUSTER_ACL_INFO: (accounts.acl_version, ADMIN),
    Code.GET_BROKER_CLUSTER_ACL_CONFIG: (accounts.acl_config, ADMIN),
    Code.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG: (accounts.put_white_addresses, ADMIN),
    Code.GET_PRODUCER_CONNECTION_LIST: (admin.producer_connections, ADMIN),
    Code.GET_ALL_PRODUCER_INFO: (admin.all_producers, ADMIN),
}
NAME_SERVER_REQUESTS: Mapping[int, tuple[NameServerHandler, Rule]] = {
    Code.REGISTER_BROKER: (nameserver.register_broker, ADMIN),
    Code.UNREGISTER_BROKER: (nameserver.unregister_broker, ADMIN),
    Code.QUERY_DATA_VERSION: (nameserver.data_version, ADMIN),
    Code.GET_ROUTEINFO_BY_TOPIC: (nameserver.route, KNOWN),
    Code.GET_BROKER_CLUSTER_INFO: (nameserver.cluster, KNOWN),
    Code.GET_DEPARTED_BROKERS: (nameserver.departed, KNOWN),
    Code.FORGET_BROKER: (nameserver.forget_broker, ADMIN),
    Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: (nameserver.topics, KNOWN),
    Code.GET_TOPICS_BY_CLUSTER: (nameserver.topics_of_cluster, KNOWN),
    Code.GET_SYSTEM_TOPIC_LIST_FROM_NS: (nameserver.system_topics, KNOWN),
    Code.GET_KV_CONFIG: (nameserver.get_kv, KNOWN),
    Code.GET_KVLIST_BY_NAMESPACE: (nameserver.kv_list, KNOWN),
    Code.GET_NAMESRV_CONFIG: (nameserver.config, ADMIN),
    Code.PUT_KV_CONFIG: (nameserver.put_kv, ADMIN),
    Code.DELETE_KV_CONFIG: (nameserver.delete_kv, ADMIN),
    Code.DELETE_TOPIC_IN_NAMESRV: (nameserver.delete_topic, ADMIN),
    Code.WIPE_WRITE_PERM_OF_BROKER: (nameserver.wipe_write, ADMIN),
    Code.ADD_WRITE_PERM_OF_BROKER: (nameserver.add_write, ADMIN),
}
# Requests of brokers, which are on other machines. `--admin loopback` does not concern them.
OF_BROKERS = frozenset(
    (
        Code.AGREE_ON_MEMBERS,
        Code.CONFIRM_WORD,
        Code.REGISTER_BROKER,
        Code.UNREGISTER_BROKER,
        Code.QUERY_DATA_VERSION,
    )
)
