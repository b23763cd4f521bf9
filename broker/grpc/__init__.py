"""The gRPC server, for the official clients of RocketMQ 5. The only package that knows its messages and codes.

server     HTTP/2 connections, the table of methods, dispatch
calls      one call and its response
clients    sessions by client id, the context of handlers
routes     QueryRoute, QueryAssignment
producing  SendMessage, EndTransaction, RecallMessage
conversion gRPC messages from and to stored records
consuming  ReceiveMessage, AckMessage, ChangeInvisibleDuration
telemetry  settings and commands on a client's stream, Heartbeat, NotifyClientTermination
lite       SyncLiteSubscription, settings of lite consumers
schema     the protobuf messages, status codes, checks of names
"""
