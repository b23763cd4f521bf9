"""The pages: one module for each section of the console.

groups         all groups, and one group
group_changes  create, change and delete a group, reset its offsets
overview       message rates and findings
jobs           replays as jobs: list, progress, stop, and the requests of the command line
dead_letters   show, replay and discard dead letters
topics         all topics, and one topic; create, change and delete
messages       find and follow messages, and show one
history        messages from the newest back, in pages
logging_in     log in and out
downloads      a body, and a list of messages, as files
sending        send a message that the user writes or copies
brokers        the state of brokers; findings about the cluster
listing        a list of names with filter, order and pages
paging         a part of a long list
"""
