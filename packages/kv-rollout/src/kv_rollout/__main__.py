"""Run the command as ``python -m kv_rollout``."""

import sys

from kv_rollout.cli import main

if __name__ == "__main__":
    sys.exit(main())
