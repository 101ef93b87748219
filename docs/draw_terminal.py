"""Draw what a terminal shows of a command as an SVG picture, when a text appears or at the end of the command.

python docs/draw_terminal.py docs/demo.svg --until "step 150/" -- shardline train --preset demo
"""

from __future__ import annotations

import argparse
import fcntl
import html
import itertools
import os
import pty
import signal
import struct
import subprocess
import termios
from pathlib import Path

import pyte

LETTER, LINE, MARGIN = 8.4, 18, 16  # pixels
COLORS = {"default": "#d6deeb", "brightblack": "#5f7081", "cyan": "#4fd0e0", "green": "#8fd47f", "yellow": "#e6c56b"}
BACKGROUND = "#10161e"


def shown(words: list[str], columns: int, rows: int, until: str) -> pyte.Screen:
    """The screen after the command has ended, or when `until` was printed; the command is then interrupted."""
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(rows)}
    running = subprocess.Popen(words, stdin=there, stdout=there, stderr=there, env=environment, start_new_session=True)
    os.close(there)
    try:
        while data := os.read(here, 1 << 16):
            stream.feed(data)
            if until and any(until in line for line in screen.display):
                break
    except OSError:  # the command has closed its terminal
        pass
    if running.poll() is None and until:
        os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    os.close(here)
    return screen


def lines_of(screen: pyte.Screen) -> list[list[tuple[str, str]]]:
    """(text, colour) of each stretch of each line; empty lines at the end are left out."""
    found = []
    for number in range(screen.lines):
        letters = [
            (screen.buffer[number][column].data, screen.buffer[number][column].fg) for column in range(screen.columns)
        ]
        runs = itertools.groupby(letters, key=lambda letter: letter[1])
        found.append([("".join(text for text, _ in run), color) for color, run in runs])
    while found and not "".join(text for text, _ in found[-1]).strip():
        found.pop()
    return found


def svg(lines: list[list[tuple[str, str]]], columns: int, command: str) -> str:
    width, height = round(columns * LETTER + 2 * MARGIN), (len(lines) + 1) * LINE + 2 * MARGIN
    rows = [[(f"$ {command}", "brightblack")], *lines]
    texts = []
    for number, line in enumerate(rows):
        spans = "".join(
            f'<tspan fill="{COLORS.get(color, COLORS["default"])}">{html.escape(text)}</tspan>' for text, color in line
        )
        texts.append(f'<text x="{MARGIN}" y="{MARGIN + (number + 0.8) * LINE:.0f}" xml:space="preserve">{spans}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="14">\n'
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>\n' + "\n".join(texts) + "\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path)
    parser.add_argument("--until", default="", help="draw when this text is on the screen")
    parser.add_argument("--columns", type=int, default=80)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("command", nargs="+", metavar="-- COMMAND")
    options = parser.parse_args()
    screen = shown(options.command, options.columns, options.rows, options.until)
    words = " ".join([Path(options.command[0]).name, *options.command[1:]])
    options.picture.write_text(svg(lines_of(screen), options.columns, words), encoding="utf-8")


if __name__ == "__main__":
    main()
