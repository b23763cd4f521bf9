"""The requests that a broker answers.

dispatch     the table from request code to handler, and the way of the frames of one socket read through it
sends        SEND_MESSAGE, its V2, SEND_BATCH_MESSAGE, CONSUMER_SEND_MSG_BACK
pulls        PULL_MESSAGE
replies      SEND_REPLY_MESSAGE
searches     QUERY_MESSAGE, VIEW_MESSAGE_BY_ID
membership   heartbeats, member lists, locks, group settings
offsets      offsets and topics
assignments  QUERY_ASSIGNMENT
admin        administration of the broker and its topics
group_admin  administration of groups
"""
