"""How many compilers run at once when the kernels are compiled."""

import os
from pathlib import Path

from services.worker.backends.native.build import built

COMPILER = """#!/bin/sh
mkdir "$0.running" || { echo "error: two at once"; exit 1; }
seq 20000 > "$0.log"
for last; do :; done
touch "$last"
rmdir "$0.running"
"""


def test_one_processor_compiles_one_file_at_a_time(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        with built(str(compiler), (), lambda: None) as library:
            assert library.exists()
    finally:
        os.sched_setaffinity(0, before)
