"""Events of the prefix cache, with the tokens of each block, for routers of other projects. The
pool stores only hashes of blocks, and the scheduler stores the tokens. `recorder` joins the changes
that the pool reports for a transaction with the requests of the transaction. `log` stores the
newest batches of events for the publishers.
"""
