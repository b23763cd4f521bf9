"""Repeatable measurements beside peers, started here and measured in the same run.

Each program prints a table and takes `--json`; README.md has the figures that are published.

sends, five, foreign   acknowledged sends and pulls, by client
latency     from `send` to a handler of another process, under load
drain       a backlog consumed
churn       members that come and go
start, restart, testkit   until a broker is ready, also over what it has stored, and in a test suite
cpu, cpu_paths, steps   the cost of each path, against a table
scale, scale_broker     the cost of growth: members, topics, timers and so on, each with its slope
ways        the functions and files of each path
spark       the Spark source and sink
versus      the demo with Java members on Apache's broker
calibration, versions   how fast this machine is; what the peers are
publish     rows of README.md from the results of several runs
runner      what all of them do: options, alternating rounds, medians and ratios, tables, the JSON line
peers, echo, five_client   the systems beside which we measure, as processes
__main__    one program, or those of `make bench`, one after the other
"""
