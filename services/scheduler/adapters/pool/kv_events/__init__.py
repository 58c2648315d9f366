"""What enters and leaves the prefix cache, with the tokens of each block, for routers of others.

The pool knows hashes, the scheduler the tokens behind them. The recorder joins what the pool
reports of a transaction with the requests that the transaction was about, and the log keeps the
newest batches for everything that publishes them.
"""
