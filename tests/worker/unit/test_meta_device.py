"""torch without its support of the device "meta", which comes when it is asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path

from services.worker.backends.meta_device import import_torch, support_meta_device

ROOT = Path(__file__).parents[3]
PROGRAM = """
import json, sys
from services.worker.backends.meta_device import import_torch, support_meta_device

def shape():
    try:
        return list(torch.fft.fft(torch.empty(3, 4, device="meta")).shape)
    except NotImplementedError:
        return None

import_torch()
import torch
found = [shape(), torch.fft.fft(torch.ones(4)).real.tolist()]
support_meta_device()
support_meta_device()
import torch._decomp
print(json.dumps([*found, shape(), len(torch._decomp.decomposition_table) > 100]))
"""


def test_shapes_are_known_once_the_device_is_supported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [None, [4, 0, 0, 0], [3, 4], True]


def test_nothing_changes_where_torch_was_imported_before() -> None:
    import torch  # noqa: PLC0415 - any other test may have imported it

    before = sys.modules["torch._meta_registrations"]
    import_torch()
    support_meta_device()
    assert sys.modules["torch._meta_registrations"] is before
    assert torch.empty(3, device="meta").shape == (3,)
