"""The parts that several modules of tests use.

accounts, certificates   accounts and certificates for tests
requests, grpc_client    requests as clients write them
peers       connections of both protocols to a broker in this process, without a socket
forged      bytes that look like records
topics, stores, clocks   topics of a node, stores without a broker, clocks that tests set
locks, apache_locks      locks without a broker; those of Apache's broker
examples    how many examples a slow Hypothesis test gets
habits, sources   private accesses and sleeps of tests; all modules, parsed once
pacing      pauses of load generators and of faults at random moments
agreement, browser   one broker's half of an agreement, and the machine's Chromium
draining, two_brokers, sick_cluster   foreign members, two brokers, and a cluster with everything that can be ill
handlers, turns, metrics   handlers that keep their messages, work in pieces, a page of metrics
pairs       two brokers that get the same bytes, of which one uses the compiled module
spark_home   Spark as tests start it
staged      forty clusters, well and sick, of which doctor must say what is wrong and nothing else
"""
