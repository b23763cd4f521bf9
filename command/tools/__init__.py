"""Commands that look, measure, copy and repair.

top      rates, lags and members, live
doctor  what is wrong, and what to do
asyncapi  the AsyncAPI document of an application
bench   loads a cluster, shows rates and waits
load    that load, and how it went
dump    shows what clients and brokers say to each other
frames  frames as people and programs read them
mirror  copies to another cluster
move    producers and groups to another cluster
fsck    checks a data folder, repairs it
backup  copies a data folder while its broker runs, and back
"""
