"""A RocketMQ broker and name server in one asyncio process.

cli, server, connection   start, listen, read and write sockets
dispatch                  the table from request code to handler
nouns: topics, offsets, consumer_groups, group_configs, locks, held_pulls, delays, routes, history
verbs: sending, pulling, grouping, querying, naming (handlers), registration (towards name servers)
store/                    what lies on disk
config                    every setting and limit
"""
