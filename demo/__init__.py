"""The demo: a year of flights through a cluster of real processes, with consumers that come, go and die.

__main__     the course of events
processes    children: brokers, members, Spark
flights      the data
screen       the terminal meanwhile
replay       the producer
accounting   the tables at the end
member       one consumer
timeline     who owned which queue, and what hand-overs waited for
spark_job    two streaming queries
page         the page that shows it (page.html draws it)
"""
