"""The requests that a broker answers. Each handler is a function of the broker, the connection and the frame.

sends         SEND_MESSAGE, its V2, SEND_BATCH_MESSAGE, CONSUMER_SEND_MSG_BACK
pulls         PULL_MESSAGE, LITE_PULL_MESSAGE
pops          POP_MESSAGE and what belongs to it
replies       SEND_REPLY_MESSAGE
recalls       RECALL_MESSAGE
searches      QUERY_MESSAGE, VIEW_MESSAGE_BY_ID
transactions  END_TRANSACTION
membership    heartbeats, member lists, locks
strangers     members that pull before their heartbeat
agreement     what other brokers say of groups with foreign members
offsets       a group's offsets, and where queues begin and end
topics        the settings of topics
assignments   QUERY_ASSIGNMENT
name_server   the name server's requests
admin         administration of the broker
monitoring    what monitoring asks brokers
accounts      administration of accounts
group_admin   administration of groups
"""
