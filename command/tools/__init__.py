"""Commands that inspect, measure, copy and repair.

top       shows rates, lags and members continuously
doctor    reports problems, and how to fix them
asyncapi  prints the AsyncAPI document of an application
bench     loads a cluster, shows rates and latencies
load      the load of `bench`, and its results
dump      shows the frames between clients and brokers
frames    formats frames as text and as JSON
mirror    copies to another cluster
move      moves producers and groups to another cluster
fsck      checks a data folder, repairs it
backup    backs up a data folder while its broker runs, and restores it
"""
