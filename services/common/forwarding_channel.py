"""A client channel over one of grpc's own."""

from abc import abstractmethod
from typing import Self

import grpc


class ForwardingChannel(grpc.aio.Channel):
    """Connects as the channel does that it is over."""

    @abstractmethod
    def current(self) -> grpc.aio.Channel:
        """The channel for a call that begins now."""

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.current().channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
