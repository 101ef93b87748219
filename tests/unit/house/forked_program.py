"""What the tests of tests/prefork.py start."""

import os
import subprocess
import sys
import time


def main(what: str, *words: str) -> None:
    if what == "show":
        print(os.getpid(), os.getppid(), os.getsid(0), os.getcwd(), os.environ["SHARDLINE_WORD"], sep="\n")
        print("torch" in sys.modules, input(), sep="\n")
        os.write(int(words[0]), b"through the pipe")
        sys.exit(3)
    elif what == "raise":
        raise ValueError("raised")
    elif what == "start":
        subprocess.run([sys.executable, "-m", "tests.unit.house.forked_program", "parent"], check=True)
    elif what == "parent":
        print(os.getpid(), os.getppid(), flush=True)
        while os.getppid() != 1:  # until the one that started this has ended
            time.sleep(0.01)
    else:
        time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
