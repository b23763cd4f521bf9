"""Connected clients as the state sees them, whichever protocol they use.

session     a client: the identity that groups and waiting pulls keep
events      events and requests that the broker sends to clients
clients     producers by group, and sessions by client id
requests    open requests to clients
refusal     the reasons why requests are refused
shares      a limit on all clients together, of which each address and account may use a share
reports     which errors of clients are logged, and the recent ones
grpc_stats  statistics of gRPC clients
"""
