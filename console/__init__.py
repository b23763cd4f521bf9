"""`rocketlet console`: a web page that shows a cluster, Rocketlet's or Apache's, and changes it.

server      listens, and ends with its streams
application the routes, from paths to pages
console     what all pages share: one client, samples, notices
guard       what a request must have: a known host, and for a change a token of ours
page        renders a page, then sends the parts of it that change (server-sent events)
form        what was filled in, checked
change      asks, does, and says what it did
rotation    asks for one thing after another, at a cost that does not grow with them
samples     groups and topics as they were seen last, and their lag over time
group_watch a group that somebody looks at: its queues, owners, events and hand-overs
oldest      when the first message of a queue was stored
charts      lines and the picture of a rebalance, as SVG
message_text  a body as text, JSON, MessagePack and hex
text        numbers, times and names as people read them
config      every limit
"""
