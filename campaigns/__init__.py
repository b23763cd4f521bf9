"""Campaigns: attacks that run short in CI and for hours by hand. `python -m campaigns --help`.

crash       disks that fail, power cuts, damaged files (disk, power, files)
kill        brokers that are killed, or short of open files (kill, pop, descriptors)
forge       bodies that look like records
frames, calls, floods   fuzzed requests and calls, and floods over HTTP/2
sends       the same sends to a broker with the compiled module and to one without
access      requests of anonymous clients and of accounts without permissions
cost, stalls, exhaustion   inputs that cost, the largest requests, what runs out
chaos       members and brokers that come, go, are killed and freeze
incidents   incidents of operators, and which tool names them
faults      patches that plant faults, which campaigns and tests must notice
store       a broker without sockets, what it acknowledged, and what is left
common      how long to go on, and the outcome
__main__    runs one by its name

_attacks, _fuzz, _http2, _strange_calls   attackers, made bytes, clients without a socket
_member, _overlaps   a member as a process; messages in flight at two members
_incidents   clusters in which something is wrong
_subjects   the parsers whose cost is measured
"""
