"""`torchrun -m shardline.train --job.config_file FILE ...` is `shardline train` inside each rank."""

import sys

from shardline.cli.main import program

if __name__ == "__main__":
    sys.exit(program(["train", *sys.argv[1:]]))
