"""The worker's core: the batch of requests, which is kept between steps, and the steps."""
