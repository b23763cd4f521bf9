"""Functions about the machine that brokers and clients both need.

address  the address of this machine in its network, and addresses that only this machine reaches
files    files whose paths users give: size limits, no pipes, locks
memory   keeps freed memory in the process
version  Rocketlet's version
"""
