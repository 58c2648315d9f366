"""The laboratory: whole fleets of replicas on simulated time.

The schedulers, the pools and the gateway's routing are the real cores. Only the device is
simulated: a step takes the time that a profile says, and its tokens are known in advance. There is
one heap of events, no event loop and no message.
"""
