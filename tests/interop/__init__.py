"""Clients of others on our brokers, and ours on Apache's.

systems     brokers that several tests share
official    official clients of 5.x, as programs
mqadmin     mqadmin in one virtual machine
spark_job   a Spark job in a process of its own
features, compatibility   the marks of proofs, and docs/compatibility.md made of them
"""
