"""The `rocketlet` command.

fsck          checks a data folder, repairs it
cli           its commands and options
access        the options of TLS and accounts
logs          how it logs
group_report  `rocketlet groups`
"""
