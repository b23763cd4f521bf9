"""The simulation: brokers and members in one process, on a virtual clock and a simulated network.

loop        the event loop, its clock and network, and the processes that run on it
members     a consumer of ours, models of Apache's consumer and of a client that pops
world       what a seed decides of a run, the run, and what must hold in it
results     the results of runs, in a file and as a table
scenarios   single faults, situations that chance makes rarely, and which a seed plays
patches     broken promises, and patches of brokers and clients
weeks       a program: weeks of virtual time
__main__    runs seeds
"""
