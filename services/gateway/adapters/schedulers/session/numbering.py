"""The sequence numbers of a session's messages in both directions. The numbers reveal lost and
repeated messages.
"""

from collections import deque

from stepwell.scheduler.v1 import scheduler_pb2

from services.gateway.adapters.schedulers.session.wrong_message import require


class Numbering:
    """Numbers sent messages, and checks the numbers of received messages. Received messages also
    acknowledge sent messages.
    """

    def __init__(self) -> None:
        self.untaken_since = 0.0
        """The time when the oldest unacknowledged message was sent, or the latest acknowledgement
        arrived, whichever is later.
        """
        self._num_sent = self._num_received = 0
        self._untaken: deque[tuple[int, int]] = deque()
        """The unacknowledged messages, each with its number, and the number of requests in all
        messages up to it.
        """
        self._num_requests = self._taken_number = self._num_taken_requests = 0

    @property
    def has_untaken(self) -> bool:
        return bool(self._untaken)

    def number(self, message: scheduler_pb2.SessionRequest, now: float) -> None:
        self._num_sent += 1
        message.number = self._num_sent
        match message.WhichOneof("message"):
            case "add":
                self._num_requests += 1
            case "adds":
                self._num_requests += len(message.adds.requests)
        if not self._untaken:
            self.untaken_since = now
        self._untaken.append((self._num_sent, self._num_requests))

    def check(self, message: scheduler_pb2.SessionResponse, now: float) -> None:
        """Raises WrongMessage if a received message is out of sequence, or acknowledges messages
        that were not sent.
        """
        self._num_received += 1
        if message.number != self._num_received:
            require(False, f"message {message.number} arrived where {self._num_received} is next")
        taken = message.taken_number
        if taken != self._taken_number:
            require(
                self._taken_number < taken <= self._num_sent,
                f"message {taken} is acknowledged after {self._taken_number}, of {self._num_sent} "
                "sent",
            )
            while self._untaken and self._untaken[0][0] <= taken:
                self._num_taken_requests = self._untaken.popleft()[1]
            self._taken_number, self.untaken_since = taken, now
        if message.num_taken_requests != self._num_taken_requests:
            taken, sent = message.num_taken_requests, self._num_taken_requests
            require(
                False, f"num_taken_requests is {taken}, but the acknowledged messages have {sent}"
            )
