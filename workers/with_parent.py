"""Run a Python program that ends when its parent does.

    python workers/with_parent.py PROGRAM.py ARGS

stdin is a pipe that the parent holds and writes nothing into. When it ends, this process kills its group,
which it leads, so that a program that never looks is gone too, with all it started. The program has an empty
stdin of its own; its exit status or signal becomes that of this process.
Started by molt/sources.ts, for prompts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main() -> None:
    program = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.DEVNULL)
    threading.Thread(target=end_with_stdin, daemon=True).start()
    status = program.wait()
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)


def end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
