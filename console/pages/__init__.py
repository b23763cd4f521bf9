"""The pages: one module for each section of the console.

groups         groups, and one of them closely
group_changes  made, changed, deleted, offsets reset
overview       what comes in and goes out, and what is in trouble
dead_letters   looked at, sent again, discarded
topics         topics, and one of them; made, changed, deleted
messages       found, followed, and one of them
sending        a message that the user writes or copies
brokers        how they do; what is wrong in the cluster
listing        names that the user filters, sorts and turns the pages of
paging         a part of a long list
"""
