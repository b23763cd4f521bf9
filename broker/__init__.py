"""A RocketMQ broker and name server in one asyncio process.

server       listening sockets; runs the servers of a process
tls          TLS for clients, certificates
broker       the parts of a broker, and its timers
runtime      clock, tasks, deferred work
machine      the default memory budget, file descriptors, files that an operator edits
config       every setting and limit
sessions/    connected clients, whichever protocol they use
memory       the memory that all connections may hold together
access       accounts and permissions
nameserver   the name server's routes
cluster      connections to name servers and to other brokers
metrics      Prometheus metrics and health checks
remoting/    the server of RocketMQ's remoting protocol: connections, dispatch, handlers
grpc/        the server for the official clients of RocketMQ 5
groups/      consumer groups: members, leases, offsets, pulls
pops/        POP: messages shared among the clients of a group
messages/    topics, sends, delayed messages, transactions, filters
store/       the data folder
"""
