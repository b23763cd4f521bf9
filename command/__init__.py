"""The `rocketlet` command.

cli           its commands and options
logs          how it logs
group_report  `rocketlet groups`
"""
