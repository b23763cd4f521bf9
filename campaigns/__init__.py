"""Campaigns: attacks that run short in CI and for hours by hand. `python -m campaigns --help`.

crash       disks that fail, power cuts and kills, damaged files (disk, power, pop, files)
processes   broker processes that are killed, or short of open files (kill, descriptors)
forge       bodies that look like records
fuzz        fuzzed requests and calls (frames, calls)
cost, exhaustion   inputs that cost much, and attackers that take all of one resource
incidents   incidents of operators, and which tool names them
faults      patches that plant faults, which campaigns and tests must notice
common      limits, outcomes, and a broker in this process
corpus      the inputs of the fuzz campaigns
store       a broker without sockets, what it acknowledged, and what is left
__main__    runs a campaign by its name

_attacks    attackers as processes
"""
