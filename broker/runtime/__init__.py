"""What all parts of a broker run on: time, and long work in pieces, so that one request does not block the event loop.

clock        the source of time for state
turns        work in pieces, in turns
timeouts     ends of waits, as work in turns
arrivals     work for clients that wait for messages
tasks        background tasks
jobs         work that waits for the device, and its thread
adoption     entries of state files that a start adopts
generation   the number by which cached checks are invalidated
live_config  the current settings
histogram    durations in buckets
runtime      one object with what each part needs
"""
