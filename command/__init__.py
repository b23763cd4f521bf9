"""The `rocketlet` command.

fsck          checks a data folder, repairs it
cli           its commands and options
logs          how it logs
group_report  `rocketlet groups`
"""
