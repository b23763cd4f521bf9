"""The part of a listening socket that all doors share.

client      a client's socket, as far as TLS deals with it
carrier     a client's socket as any door may use it, whichever made it
arrival     a client whose door is not loaded yet
entrance    whether a client speaks TLS, by its first byte
self_signed  a certificate where none is given
expiry      until when certificates are valid
tls         how TLS is set up: mode, certificates and keys
handshakes  which TLS handshakes run, and which wait
records     a TLS client's bytes, until they are decrypted
"""
