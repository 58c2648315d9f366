"""Watches a certificate's files, so that a new certificate is used without a restart."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from services.common.tls.certificates import (
    Certificate,
    CertificateError,
    CertificateFiles,
    PemContents,
)

logger = logging.getLogger(__name__)

Check = Callable[[CertificateFiles, PemContents], Certificate]

PERIOD_SECONDS = 1.0
"""Seconds between two readings of the files. The contents are compared, since modification times
are unreliable if directories are swapped, as in Kubernetes.
"""
_LAST_SHARE = 0.1
"""A warning is logged if less than this fraction of a certificate's lifetime is left."""


class CertificateWatch:
    """Reads a certificate from files. `current` is the certificate that the files contained when
    they were last valid. Any thread may read it. A new certificate is a new object. Damaged,
    half-written or expired files change nothing and are logged once.
    """

    def __init__(
        self,
        purpose: str,
        files: CertificateFiles,
        check: Check,
        unix_seconds: Callable[[], float] = time.time,
    ) -> None:
        """`purpose` names the certificate in logs and metrics. `check` is `check_certificate`.
        Raises CertificateError.
        """
        self.purpose = purpose
        self.files = files
        self.current: Certificate = check(files, files.read())
        self._check = check
        self.num_reloads = 0
        self._unix_seconds = unix_seconds
        self._complaint = ""
        self._warned_of: Certificate | None = None
        self._stop = threading.Event()

    @property
    def is_usable(self) -> bool:
        """Whether the files could be used when they were last read."""
        return not self._complaint

    @property
    def seconds_left(self) -> float:
        """Seconds until the certificate expires. Negative if it has expired."""
        return self.current.not_after - self._unix_seconds()

    @contextlib.contextmanager
    def running(self, period_seconds: float = PERIOD_SECONDS) -> Iterator[None]:
        """Reads the files periodically in a thread until the `with` block ends."""
        thread = threading.Thread(
            target=self._run,
            args=(period_seconds,),
            name=f"{self.purpose} certificate",
            daemon=True,
        )
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def look(self) -> None:
        """Reads the files. A new and valid certificate becomes `current`."""
        try:
            contents = self.files.read()
            if contents != self.current.pem:
                self.current = self._check(self.files, contents)
                self.num_reloads += 1
                logger.info("the %s certificate was replaced%s", self.purpose, self._validity())
            self._complaint = ""
        except CertificateError as error:
            self._failed(str(error))
        self._warn_before_the_end()

    def _run(self, period_seconds: float) -> None:
        while not self._stop.wait(period_seconds):
            try:
                self.look()
            except Exception:
                logger.exception(
                    "a defect prevented the reading of the %s certificate", self.purpose
                )

    def _failed(self, complaint: str) -> None:
        if complaint != self._complaint:
            self._complaint = complaint
            logger.warning("%s; the previous %s certificate stays in use", complaint, self.purpose)

    def _warn_before_the_end(self) -> None:
        current = self.current
        whole = current.not_after - current.not_before
        if self.seconds_left < _LAST_SHARE * whole and self._warned_of is not current:
            self._warned_of = current
            logger.warning(
                "the %s certificate ends soon and must be replaced%s",
                self.purpose,
                self._validity(),
            )

    def _validity(self) -> str:
        return f": it is valid for another {_span(self.seconds_left)}"


def _span(seconds: float) -> str:
    if seconds >= 2 * 86_400:
        return f"{seconds / 86_400:.0f} days"
    return f"{max(0.0, seconds) / 60:.0f} minutes"
