"""The laboratory simulates whole fleets of replicas in virtual time.

The schedulers, the pools and the gateway's routing are the real cores. Only the device is
simulated: a step takes the time that a profile predicts, and its tokens are known in advance. A
heap of events replaces the event loop and the messages.
"""
