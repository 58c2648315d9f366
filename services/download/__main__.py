"""Downloads a model: `python -m services.download`. A failure ends it with one sentence."""

import errno
import logging
import os
import signal

from services.common.model_source.errors import HubCause, HubError, ModelSourceError
from services.common.process.logs import configure_logs
from services.common.process.settings import exit_with, load_settings
from services.download.download import download
from services.download.settings import DownloadSettings

_TERMINATED = 128 + signal.SIGTERM
_LIBRARY_VARIABLES = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # the log has lines of its own
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # Otherwise hf_xet has buffers of up to 8 GB, which may exceed the memory limit of a container.
    "HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_SIZE": "512mb",
    "HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_PERFILE_SIZE": "64mb",
    "HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_LIMIT": "1gb",
}
"""Defaults of the libraries' variables. They are read when the libraries are imported."""
_SIZE = "model.claim.size or model.download.size"
_TOKEN = "model.download.tokenSecret"
CHART_VALUES = {
    HubCause.GATED: _TOKEN,
    HubCause.TOKEN: _TOKEN,
    HubCause.NO_MODEL: f"model.download.source, {_TOKEN}",
    HubCause.NO_REVISION: "model.download.source",
    HubCause.NO_WEIGHTS: "model.download.source",
    HubCause.OFFLINE: "model.download.extraEnv",
    HubCause.UNREACHABLE: "model.download.endpoint, model.download.extraEnv for a proxy, "
    "networkPolicy.extraEgress",
    HubCause.NO_SPACE: _SIZE,
}
"""The value of the Helm chart that removes a cause."""
_WRITING = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _SIZE),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "podSecurityContext.fsGroup"),
    errno.EROFS: "model.volume",
}
_OF_THE_HUB = (HubCause.TOKEN, HubCause.REFUSED, HubCause.OFFLINE, HubCause.UNREACHABLE)


def main() -> None:
    # The first process of a container gets no default action for signals. Threads of the library
    # would delay an exception until their files are complete.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(_TERMINATED))
    settings = load_settings(DownloadSettings, "download")
    for name, value in _LIBRARY_VARIABLES.items():
        os.environ.setdefault(name, value)
    configure_logs("download", settings.log_level, settings.log_format)
    _quieten_libraries()
    try:
        download(settings)
    except ModelSourceError as error:
        exit_with(f"stepwell download: {sentence(error, settings)}", 1)
    except OSError as error:
        exit_with(f"stepwell download: {writing(error, settings)}", 1)


def sentence(error: ModelSourceError, settings: DownloadSettings) -> str:
    """The error's message, with the value of the Helm chart to change."""
    if not isinstance(error, HubError):
        return str(error)
    if isinstance(error.__cause__, OSError) and error.cause is HubCause.WRITING:
        return writing(error.__cause__, settings)
    text = str(error)
    if error.cause in _OF_THE_HUB:
        hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
        text = f"{settings.model} cannot be downloaded from {hub}: {error}"
    value = CHART_VALUES.get(error.cause)
    return text if value is None else f"{text} (in the Helm chart: {value})"


def writing(error: OSError, settings: DownloadSettings) -> str:
    value = _WRITING.get(error.errno or 0)
    if value is None:
        return f"{settings.directory} cannot be written: {error}"
    return f"{settings.directory.parent}: {error.strerror} (in the Helm chart: {value})"


def _quieten_libraries() -> None:
    """Sends warnings of the libraries to the log, and not each of their requests."""
    for name in ("httpx", "httpx2", "filelock"):
        logging.getLogger(name).setLevel(logging.WARNING)
    from huggingface_hub.utils import logging as library_logging  # noqa: PLC0415 - reads variables

    library = library_logging.get_logger()
    library.handlers.clear()
    library.propagate = True


if __name__ == "__main__":
    main()
