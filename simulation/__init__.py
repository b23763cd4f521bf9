"""Brokers and members in one process, on a virtual clock and a simulated network: `python -m simulation 0 200`.

world       one run: its brokers, members and faults, and what must hold
loop        the event loop, the clock and the network
plan        what a seed decides before anything happens
scenarios   situations that chance makes rarely
chaos       misfortunes, by chance or as a scenario
member, foreign   a consumer of ours; a model of Apache's
patches     makes moments long enough for chance
backlogs, violations   queues that nobody reads; the promises that were broken
sharing     another run: of a group whose members share messages, or some do
popping, hands  a model of a client that pops; what it has, and until when
planted, planted_pops   faults of other designs, which the simulation must find
rolls, weeks   programs: rolls of members, weeks of virtual time
__main__    runs seeds
"""
