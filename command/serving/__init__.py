"""Brokers, name servers and the console as processes.

serve               runs brokers and name servers
server_options      the options of brokers and name servers
layout              the ports, folders and commands of several brokers on one machine
supervisor          starts, restarts and stops the processes of several brokers
supervisor_metrics  metrics of the supervisor
settings            options from the environment and a TOML file
listening           opens listening sockets, and explains failures
control             runs a broker under test with an HTTP interface
console             serves the web page
"""
