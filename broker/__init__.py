"""A RocketMQ broker and name server in one asyncio process.

server       listens, and owns what runs in this process
broker       a broker's state and its timers
clock        the time that a broker reads and waits by
config       every setting and limit
remoting/    the door for RocketMQ's remoting protocol: sockets, frames, the handlers of requests
grpc/        the door for the official clients of RocketMQ 5
listening/   what doors share of a listening socket: TLS
observing/   metrics and health checks
pops/        messages shared among the clients of a group
consuming/   what pulling and committing mean
groups/, messages/  the state that the doors read and change
sessions/    who is there
access/      who may do what
nameserver/  the name server's state
cluster/     connections to name servers and to other brokers
store/       what is on the disk
running/     how the process runs: timers, tasks, long work, files and memory
"""
