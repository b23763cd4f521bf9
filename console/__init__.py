"""`rocketlet console`: a web page that shows a cluster, Rocketlet's or Apache's, and changes it.

server      starts and stops the web server
application the routes, from paths to pages
console     the state that all pages share: one client, samples, notices
guard       checks of requests: a known host, and a token for changes
jobs        replays of dead letters as jobs, kept over a restart
login       users with a role, and their sessions
page        renders a page, then sends the parts of it that change (server-sent events)
form        the checked values of a form
change      asks for confirmation, makes a change, and reports it
rotation    queries groups and topics in rotation, for a fixed share of the time
metrics     findings as metrics, for Prometheus
samples     the last samples of groups and topics, and their lag over time
group_watch a group that a page shows: its queues, owners, events and rebalances
oldest      store times of the first messages of queues
charts      lines and the picture of a rebalance, as SVG
message_text  a body as text, JSON, MessagePack and hex
text        formats numbers, times and names
config      limits and intervals
"""
