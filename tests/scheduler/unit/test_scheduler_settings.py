"""Times that the scheduler cannot use are refused at its start."""

import pytest

from services.common.process.settings import SettingError, parse_settings
from services.scheduler.settings import SchedulerSettings

REQUIRED = ["--kvpool", "unix:/pool", "--workers", "unix:/worker"]


@pytest.mark.parametrize(
    "flag", ["--step-timeout-seconds", "--pool-timeout-seconds", "--max-queue-seconds"]
)
def test_a_time_limit_is_at_most_a_day(flag: str) -> None:
    """A worker receives its limit as a number of milliseconds, and a gateway ends its session with
    a scheduler that announces an impossible time.
    """
    parse_settings(SchedulerSettings, "scheduler", [*REQUIRED, flag, "86400"], {})
    for text in ("inf", "1e12", "86401"):
        with pytest.raises(SettingError, match=f"{flag} must be from .* to 86400"):
            parse_settings(SchedulerSettings, "scheduler", [*REQUIRED, flag, text], {})
