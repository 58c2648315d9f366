"""`python -m tests.worlds 0 2000` runs the random worlds with the numbers 0 to 1999. A world is a
replica with random requests and failures, simulated in one process. Prints the number and the error
of each failed world, and how often each kind of event happened in all worlds.
"""

import logging
import sys
import traceback
from collections import Counter

from tests.worlds.run import live_world


def main(begin: int, end: int) -> int:
    logging.disable()
    happened: Counter[str] = Counter()
    failed = 0
    for number in range(begin, end):
        try:
            live_world(number, happened)
        except Exception as error:
            failed += 1
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
            print(f"world {number}: {where} {type(error).__name__} {error}"[:300])
    for name, count in sorted(happened.items()):
        print(f"{count:8} {name}")
    print(f"{failed} of {end - begin} worlds failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
