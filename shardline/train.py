"""`torchrun -m shardline.train --job.config_file FILE ...` is `shardline train` inside each rank."""

import sys

from shardline.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
