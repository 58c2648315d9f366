"""Events of the prefix cache, with the tokens of each block, for routers of other projects. The
pool has only hashes, and the scheduler has their tokens. The recorder joins the changes that the
pool reports for a transaction with the requests of the transaction. The log stores the newest
batches of events for the publishers.
"""
