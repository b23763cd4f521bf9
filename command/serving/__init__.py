"""Brokers, name servers and the console as processes.

serve               runs brokers and name servers
server_options      their options
layout              the ports, folders and commands of several brokers on one machine
supervisor          keeps their processes running
supervisor_metrics  counts what the supervisor does
settings            options from the environment and a TOML file
listening           why a server cannot listen
control             a broker under test, behind HTTP
console             serves the web page
"""
