"""The `rocketlet` command.

cli             its commands
serve           runs brokers and name servers
server_options  their options
layout          the ports, folders and commands of several brokers on one machine
supervisor      keeps their processes running
supervisor_metrics  counts what it does
administration  what `rocketlet NOUN VERB` commands share
brokers, topics, groups, offsets, messages, acl   the nouns
group_report    what `rocketlet groups show` prints
console         serves the web page
bench           loads a cluster, shows rates and waits
load            that load, and how it went
doctor          what is wrong, and what to do
dump            shows what clients and brokers say to each other
frames          frames as people and programs read them
mirror          copies to another cluster
fsck            checks a data folder, repairs it
version         of this program and of brokers
completion      for bash, zsh and fish
numbers         that options take, and their ranges
output          columns for people, JSON for programs
control         a broker under test, behind HTTP
access          how a command connects: TLS and accounts
config          its limits
listening       why a server cannot
settings        options from the environment and a TOML file
logs            how it logs
"""
