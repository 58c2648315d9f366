"""The settings of the download."""

import re
from dataclasses import dataclass
from pathlib import Path

from services.common.model_source.hub import HubName, parse_hub_name
from services.common.process.logs import LogFormat, LogLevel
from services.common.process.settings import setting

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([kMGT]i?|Ki|)")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def _hub_name(text: str) -> HubName:
    name = parse_hub_name(text)
    if name is None:
        raise ValueError(f"must be a name such as hf://Qwen/Qwen3-0.6B@main, not {text!r}")
    return name


def _quantity(text: str) -> int:
    """Parses an amount of bytes, with the suffixes of Kubernetes."""
    found = _QUANTITY.fullmatch(text)
    if found is None:
        raise ValueError(f"must be an amount of bytes such as 40Gi, not {text!r}")
    base = 1024 if found[2].endswith("i") else 1000
    return int(float(found[1]) * base ** _POWERS[found[2][:1]])


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadSettings:
    """Downloads a model from the Hugging Face hub, unless the directory has it already.

    The package huggingface_hub reads HF_TOKEN, HF_ENDPOINT and the other variables HF_….
    """

    model: HubName = setting(
        doc="name of the model on the hub, such as hf://Qwen/Qwen3-0.6B, with @ and a branch, tag "
        "or commit if it is not main",
        read=_hub_name,
    )
    directory: Path = setting(
        doc="directory for the model's files, which exists only once all files are complete"
    )
    weights: bool = setting(
        True, doc="also download the weights; a gateway only reads the other files"
    )
    size_limit: int | None = setting(
        None,
        doc="bytes that the files may have, such as 40Gi (default: the free space)",
        read=_quantity,
    )
    log_level: LogLevel = setting(LogLevel.INFO, doc="least severe level that is logged")
    log_format: LogFormat = setting(LogFormat.TEXT, doc="format of log lines: text or json")
