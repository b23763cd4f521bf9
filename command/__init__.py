"""The `rocketlet` command.

cli         its commands
nouns       `rocketlet NOUN VERB`
tools       doctor, dump, bench, mirror, fsck
serving     brokers, name servers and the console as processes
plumbing    what all commands share
completion  for bash, zsh and fish
config      limits
"""
