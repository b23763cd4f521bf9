"""Commands that inspect, measure, copy and repair.

top      rates, lags and members, live
doctor  what is wrong, and what to do
asyncapi  the AsyncAPI document of an application
bench   loads a cluster, shows rates and waits
load    the load of `bench`, and its results
dump    shows the frames between clients and brokers
frames  frames as text and as JSON
mirror  copies to another cluster
move    producers and groups to another cluster
fsck    checks a data folder, repairs it
backup  copies a data folder while its broker runs, and back
"""
