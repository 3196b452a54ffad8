"""``python -m gradexporter`` is the command line."""

import sys

from gradexporter.cli import main

if __name__ == "__main__":
    sys.exit(main())
