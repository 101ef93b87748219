"""`python -m shardline` is the `shardline` command."""

import sys

from shardline.cli import program

if __name__ == "__main__":
    sys.exit(program())
