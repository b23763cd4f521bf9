"""The server of RocketMQ's remoting protocol. The only package that knows its frames, response codes and remarks.

connection      one client's socket
permissions     the permissions that each request needs, and the account that has sent it
responses       how a response is encoded, and the error that is one
events          events and requests to clients
kept_pulls      pulls that have passed the checks, which clients repeat
dispatch        the table of request codes, with handler and permission; from a socket read to the responses
messages        SEND_MESSAGE, PULL_MESSAGE, replies, recalls, END_TRANSACTION, QUERY_MESSAGE
pops            POP_MESSAGE, ACK_MESSAGE, CHANGE_MESSAGE_INVISIBLETIME, POP_LITE_MESSAGE, LITE_SUBSCRIPTION_CTL
groups          HEART_BEAT, locks, assignments, offsets
administration  requests of tools: topics, groups, broker settings, monitoring
accounts        mqadmin's accounts and permissions, of 4.9 and of 5.x
name_server     the name server's requests
"""
