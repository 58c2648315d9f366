"""Converts PauseMode from and to its message."""

from stepwell.scheduler.v1 import scheduler_pb2

from services.common.replica.pause_mode import PauseMode
from services.common.rpc.proto_enum import ProtoEnum

_MODES = ProtoEnum(PauseMode, scheduler_pb2.PauseMode, "PAUSE_MODE_")

pause_mode_to_proto = _MODES.to_proto
pause_mode_from_proto = _MODES.from_proto
