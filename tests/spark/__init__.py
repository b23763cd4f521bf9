"""The Spark source and sink.

running, planners, tasks   a running source, a planner and a task, as tests need them
classes_job, connect_job, killed_job   jobs in processes of their own
strategies   ranges of queues for property tests
"""
