"""What all doors share of a listening socket.

tls         whether a client speaks TLS, by its first byte, and how it is set up
handshakes  which TLS handshakes run, and which wait
records     what a TLS client sends, until it is decrypted
"""
