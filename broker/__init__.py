"""A RocketMQ broker and name server in one asyncio process.

server        listens, and owns what runs in this process
broker        a broker's state and its timers
peers         its connections to other brokers
registration  tells name servers of the broker
metrics       what is measured for Prometheus
metrics_port  serves it, and health checks
histogram     how long something took
clock         the time that a broker reads and waits by
tasks         what runs at intervals, and what answers a request later
turns         long work, done in pieces, so that nobody waits for it
garbage       keeps the collector from looking at everything while a server runs
open_files    how many files the process may open, and how they are shared out
settings_files  certificates and accounts, which an operator changes
config        every setting and limit
requests/     the table from request code to handler, and the handlers
access/       who may do what
messages/, groups/  the state that the handlers read and change
nameserver/   the name server
net/          sockets and clients
store/        what is on the disk
"""
