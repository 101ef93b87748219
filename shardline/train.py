"""`torchrun -m shardline.train --job.config_file FILE ...` is `shardline train` inside each rank."""

import sys

from shardline.cli import program

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    sys.exit(program())
