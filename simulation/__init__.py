"""The simulation: brokers and members in one process, on a virtual clock and a simulated network.

loop        the event loop, its clock and network, and the processes that run on it
members     a consumer of ours, models of Apache's consumer and of a client that pops
scenarios   the plan of a seed, single faults, and situations that chance makes rarely
world       one run and what must hold in it
patches     broken promises, and patches of brokers and clients
rolls, weeks   programs: rolls of members, weeks of virtual time
__main__    runs seeds
"""
