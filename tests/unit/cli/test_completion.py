"""Completion scripts, asked by the shells themselves."""

import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from shardline.cli.commands import COMMANDS
from shardline.cli.completion import script
from shardline.config.files import preset_names
from shardline.config.names import SCHEDULES
from shardline.config.schema import leaves

ASK = """
ask() { COMP_WORDS=("$@"); COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 )); _shardline; printf '%s\\n' "${COMPREPLY[@]}"; }
"""


def asked(tmp_path: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    file = tmp_path / "completion.bash"
    if not file.exists():
        file.write_text(script("bash", COMMANDS) + ASK)
    done = subprocess.run(
        ["bash", "-c", f'source "{file}"; ask "$@"', "bash", "shardline", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_every_command(tmp_path):
    assert set(asked(tmp_path, "")) == {name.split()[0] for name in COMMANDS}
    assert asked(tmp_path, "bench", "") == ["comm", "overlap", "experts", "device"]


def test_bash_completes_options_and_every_key(tmp_path):
    offered = asked(tmp_path, "train", "run.toml", "--")
    assert {"--resume", "--nproc", "--help", "--preset"} <= set(offered)
    assert {f"--{key}" for key in leaves()} <= set(offered)
    assert asked(tmp_path, "train", "--training.st") == ["--training.steps"]
    assert "--training.steps" not in asked(tmp_path, "export", "--")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["train", "--preset", ""], list(preset_names())),
        (["train", "--parallelism.pipeline_parallel_schedule", ""], list(SCHEDULES)),
        (["train", "--compile.enable", "=", "f"], ["false"]),  # bash cuts words at =
        (["train", "--compile.enable=t"], ["--compile.enable=true"]),  # unless told not to
        (["export", "--dtype", "=", ""], ["float32", "bfloat16", "float16"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["train", "--nproc", ""], []),
        (["train", "--resume", "ru"], ["run.toml"]),
        (["train", "ru"], ["run.toml"]),
        (["train", "--training.dataset_path", "a"], ["a b.txt"]),
    ],
)
def test_bash_completes_values_and_files(tmp_path, words, offered):
    for name in ("run.toml", "a b.txt"):
        (tmp_path / name).touch()
    assert asked(tmp_path, *words) == " ".join(offered).split()


def test_another_shell_is_refused(run):
    code, _, err = run("completion", "bsh")
    assert code == 2
    assert "expected one of bash, zsh, fish, got 'bsh', did you mean 'bash'?" in err


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("tra", ["trace", "train"]),
        ("bench ", ["comm", "device", "experts", "overlap"]),
        ("train --training.st", ["--training.steps"]),
        ("train --preset ", sorted(preset_names())),
        ("train --compile.enable ", ["false", "true"]),
        ("completion ", ["bash", "fish", "zsh"]),
    ],
)
def test_fish_completes(tmp_path, line, offered):
    file = tmp_path / "completion.fish"
    file.write_text(script("fish", COMMANDS))
    ask = f"source {file}; complete -C 'shardline {line}'"
    found = subprocess.run(["fish", "-c", ask], capture_output=True, text=True, check=True, env=home(tmp_path)).stdout
    assert sorted(row.split("\t")[0] for row in found.splitlines()) == offered


def home(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "TERM": "dumb"}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("shardline sched", "shardline schedule"),
        ("shardline bench ov", "shardline bench overlap"),
        ("shardline train --training.st", "shardline train --training.steps"),
        ("shardline train --preset moe", "shardline train --preset moe-demo"),
        ("shardline train --compile.enable=f", "shardline train --compile.enable=false"),
        ("shardline train ru", "shardline train run.toml"),
    ],
)
def test_zsh_completes(tmp_path, line, completed):
    """A real zsh at a terminal: the line is typed, Tab is pressed, and what stands there then is read."""
    (tmp_path / "_shardline").write_text(script("zsh", COMMANDS))
    (tmp_path / "run.toml").touch()
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execvpe("zsh", ["zsh", "-f", "-i"], home(tmp_path) | {"PS1": "> "})
    try:
        type_and_wait(
            terminal, "autoload -U compinit; compinit -u -d dump; source ./_shardline; print read''y\n", "ready"
        )
        os.write(terminal, f"{line}\t".encode())
        time.sleep(1.0)
        os.write(terminal, b"\x01print -r -- '[\x05]'\n")  # the line, as the argument of a command
        found = type_and_wait(terminal, "", "\n\\[.*\\]")
        assert re.search(r"\n\[(.*)\]", found)[1].rstrip() == completed
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def type_and_wait(terminal: int, text: str, until: str) -> str:
    """Everything that the terminal shows up to a pattern, without escape sequences."""
    os.write(terminal, text.encode())
    seen = ""
    for _ in range(200):
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 65536).decode(errors="replace")
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", seen)
        if re.search(until, plain):
            return plain
    raise AssertionError(f"the terminal shows no {until!r}: {seen!r}")
