"""Sockets and the clients behind them.

connection  one client's socket
clients     producers by group, and what the broker asks of clients
answers     how an answer is encoded
tls         what a client speaks, told by its first byte, and the handshake
reports     what clients do wrong, in the log but not without end
"""
