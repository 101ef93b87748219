"""`python -m shardline` is the `shardline` command."""

import os
import sys

from shardline.cli import main

if __name__ == "__main__":
    code = main()
    if os.environ.get("WORLD_SIZE", "1") == "1" or "RANK" not in os.environ:
        sys.exit(code)
    from shardline.training.rank_main import leave

    leave(code)
