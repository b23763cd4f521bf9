"""Campaigns: attacks that run short in CI and for hours by hand. `python -m campaigns --help`.

access, calls, floods, frames   requests of strangers, fuzzed ones and floods, over gRPC and remoting
forge, cost, stalls, exhaustion, descriptors   bodies that look like records; bytes that cost; what runs out
disk, files, power, kill, pop   disks that fail, damaged folders, power cuts, SIGKILL
chaos       members and brokers that come, go, are killed and freeze
incidents   incidents of operators, and which tool names them
faults      patches that plant faults, which campaigns must notice
common      how long to go on, and the outcome
__main__    runs one by its name

_attacks, _client, _forged, _fuzz   attackers, a client without a socket, made bytes
_overlaps   messages in two hands, and what had happened before
_member, _process   processes: a member, a broker
_http2, _sharers, _strange_calls   clients of gRPC, and of both doors
_incidents   clusters in which something is wrong
_device, _ledger, _lost_end   a disk that fails, what a store acknowledged, the damage of a power cut
_popped, _timed   messages that clients share, and that are sent to a time
_subjects   the parsers whose cost is measured
"""
