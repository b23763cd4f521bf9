"""Sockets and the clients behind them.

connection  one client's socket
clients     producers by group, and what the broker asks of clients
answers     how an answer is encoded
tls         whether a client speaks TLS, by its first byte, and how it is set up
handshakes  which TLS handshakes run, and which wait
records     what a TLS client sends, until it is decrypted
reports     logs what clients do wrong, within limits
memory      what all connections together may hold
"""
