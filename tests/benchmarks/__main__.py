"""``python tests/benchmarks``, which is what ``make bench`` runs; ``--help`` says more."""

from __future__ import annotations

import os
import sys

ENVIRONMENT = {
    # Without them glibc gives memory back between steps, and page faults are most of what differs.
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "OMP_NUM_THREADS": "1",
}


def main() -> int:
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **ENVIRONMENT})
    import program  # torch reads some of them as it is imported

    return program.main()


if __name__ == "__main__":
    sys.exit(main())
