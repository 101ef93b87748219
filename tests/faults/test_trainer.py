"""The same faults in real training: one rank raises, is stopped or killed, or the user interrupts."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from shardline.tools.trace_hang import partings, read_files
from tests import processes
from tests.faults.ahead import fixtures, job
from tests.faults.test_ranks import PROMPT, is_alive, wait_until

# Ranks say in files which step they have done; rank 1 may raise, or be killed or stopped inside an overlapped product
# or a ring, where its rows or keys should be sent.
HOOKS = """
import os
import signal
import time
from pathlib import Path
from shardline.registry import register_hook

if os.environ.get("FAULT") == "starting" and "RANK" in os.environ:
    (Path(os.environ["FAULT_FOLDER"]) / f"starting-{os.environ['RANK']}").touch()
    time.sleep(60)

@register_hook("after_step")
def tell(trainer, row):
    folder, rank = Path(os.environ["FAULT_FOLDER"]), os.environ["RANK"]
    for name, value in (("pid", os.getpid()), ("step", row["step"])):
        part = folder / f"{name}-{rank}.part"
        part.write_text(str(value))
        part.replace(folder / f"{name}-{rank}")
    time.sleep(0.05)  # other jobs start meanwhile
    if os.environ.get("FAULT") == "raise" and rank == "1" and row["step"] == 3:
        (folder / "raising").touch()
        raise ValueError("a fault of its own")
    if os.environ.get("FAULT", "").startswith("SIG") and rank == "1" and row["step"] == 3:
        from shardline.comm.transfers import Exchange
        plain = Exchange.swap

        def end(exchange, *arguments):
            if exchange.what not in ("all_gather", "ring"):  # of the embedding, before the first overlapped product
                return plain(exchange, *arguments)
            time.sleep(0.5)  # what it has sent before must be on its way, or the others wait for that
            os.kill(os.getpid(), getattr(signal, os.environ["FAULT"]))

        Exchange.swap = end
    if os.environ.get("FAULT") == "validating" and row["step"] == 1:  # slowly, and for very long
        from shardline.training.whole_model import WholeModel
        plain_losses = WholeModel.losses

        def slowly(self, batches):
            (folder / f"validating-{rank}").touch()
            time.sleep(0.2)
            return plain_losses(self, batches)

        WholeModel.losses = slowly
    if os.environ.get("FAULT") == "slow" and row["step"] == 2:
        (folder / f"slow-{rank}").touch()
        time.sleep(20)
    if os.environ.get("FAULT") == "silent" and rank == "1" and row["step"] == 3:
        from shardline.parallel.pipeline.channels import Channel
        Channel.send = lambda *arguments: time.sleep(1000)
"""
SMALL = {
    "model.overrides.n_layers": 2,
    "model.overrides.dim": 32,
    "model.overrides.vocab_size": 512,
    "training.seq_len": 32,
    "training.local_batch_size": 1,
    "training.steps": 100000,
    "comm.train_timeout_seconds": 3,
}


class Run:
    def __init__(self, folder, fault="", **more):
        self.folder = folder
        (folder / "hooks.py").write_text(HOOKS)
        keys = {**SMALL, **more, "job.dump_folder": folder / "run", "experimental.custom_import": folder / "hooks.py"}
        flags = [f"--{key}={value}" for key, value in keys.items()]
        environment = {**os.environ, "FAULT_FOLDER": str(folder), "FAULT": fault}
        self.process = processes.start(
            [sys.executable, "-m", "shardline", "train", "--nproc", "2", *flags],
            shared=True,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def wait_for_step(self, step):
        wait_until(lambda: self.process.poll() is not None or self.step() >= step, 60)

    def step(self):
        try:
            return min(int((self.folder / f"step-{rank}").read_text()) for rank in (0, 1))
        except (OSError, ValueError):
            return 0

    def pid(self, rank):
        return int((self.folder / f"pid-{rank}").read_text())

    def end(self, within):
        stdout, stderr = self.process.communicate(timeout=within)
        wait_until(lambda: not any(is_alive(self.pid(rank)) for rank in (0, 1)), 2)
        return self.process.returncode, stdout, stderr

    def close(self):
        processes.end(self.process)  # its ranks die with it


run, jobs = fixtures(Run)


@job("raise")
def test_a_step_that_fails_on_one_rank_ends_training_with_its_traceback(run):
    code, _, stderr = run.end(90)
    assert code == 1
    assert stderr.count("Traceback") == 1
    assert "error: rank 1 (" in stderr
    assert stderr.rstrip().endswith("ValueError: a fault of its own")


@job()
def test_a_stopped_rank_ends_training_after_the_time_out(run):
    run.wait_for_step(2)
    os.kill(run.pid(1), signal.SIGSTOP)
    stopped = time.monotonic()
    code, _, stderr = run.end(25)
    assert code == 1, stderr
    assert time.monotonic() - stopped < 20
    assert f"pid {run.pid(1)}) has not been heard of" in stderr
    assert re.search("over (dp_shard|world|loss)", stderr)
    assert "no progress for" in (run.folder / "run" / "log" / "rank-0.log").read_text()
    files = read_files(run.folder / "run")
    assert list(files) == [0]  # a stopped rank writes nothing
    assert "no progress for" in files[0].reason
    assert any(found.ranks.get("no file") == [1] for found in partings(files))


@job(**{"comm.save_traces_folder": "flights", "comm.save_traces_file_prefix": "of-"})
def test_flight_recorders_are_written_on_request_while_training_goes_on(run):
    run.wait_for_step(2)
    run.process.send_signal(signal.SIGUSR2)
    wait_until(lambda: len(list((run.folder / "run" / "flights").glob("of-*.json"))) == 2, 30)
    files, step = read_files(run.folder / "run"), run.step()
    assert {file.reason for file in files.values()} == {"on request"}
    calls = {rank: {(axis, number): tag for axis, number, tag, *_ in file.collectives} for rank, file in files.items()}
    common = calls[0].keys() & calls[1].keys()
    assert len(common) > 10
    assert all(calls[0][call] == calls[1][call] for call in common)
    run.wait_for_step(step + 2)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.end(30)[0] == 130


@job(**{"comm.trace_buf_size": 0})
def test_without_a_flight_recorder_a_request_does_nothing(run):
    run.wait_for_step(2)
    run.process.send_signal(signal.SIGUSR2)
    run.wait_for_step(run.step() + 2)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.end(30)[0] == 130
    assert not (run.folder / "run" / "comm_traces").exists()


@job(**{"checkpoint.enable": "true", "checkpoint.interval": 100000})
def test_ctrl_c_saves_the_step_that_all_ranks_have_done(run):
    run.wait_for_step(2)
    os.killpg(run.process.pid, signal.SIGINT)
    code, stdout, stderr = run.end(30)
    assert (code, stderr) == (130, ""), stderr
    assert "at your request (SIGINT)" in stdout
    (saved,) = (run.folder / "run" / "checkpoint").glob("step-*")
    assert int(saved.name.removeprefix("step-")) == run.step()
    ranks = json.loads((run.folder / "run" / "log" / "ranks.json").read_text())
    assert [(row["rank"], row["pid"]) for row in ranks] == [(rank, run.pid(rank)) for rank in (0, 1)]


@job("validating", **{"checkpoint.enable": "true", "validation.enable": "true", "validation.steps": 100000})
def test_ctrl_c_does_not_wait_for_the_end_of_a_validation(run):
    wait_until(lambda: all((run.folder / f"validating-{rank}").exists() for rank in (0, 1)), 60)
    os.killpg(run.process.pid, signal.SIGINT)
    code, stdout, stderr = run.end(30)
    assert (code, stderr) == (130, ""), stderr
    assert "stopping, validation is skipped" in stdout
    assert [saved.name for saved in (run.folder / "run" / "checkpoint").glob("step-*")] == ["step-1"]


PIPELINE = {"parallelism.pipeline_parallel_degree": 2, "training.local_batch_size": 2}


@job("silent", **PIPELINE)
def test_a_stage_that_sends_nothing_is_named_with_what_is_missing(run):
    code, _, stderr = run.end(60)
    assert code == 1, stderr
    missing = r"gradient for stage 0, micro-batch 0 \(pp, rank 1 to rank 0\), \(1, 32, 32\) float32 \(call \d+\)"
    assert re.search(f"rank 0 waits in {missing}, where rank 1 did not arrive", stderr), stderr
    assert "step 4" in stderr


ASYNC = {
    "parallelism.tensor_parallel_degree": 2,
    "parallelism.enable_async_tensor_parallel": "true",
    "parallelism.async_tensor_parallel_backend": "ring",
    "metrics.log_freq": 1,  # every step is measured, which waits for transfers in a thread of its own
}


@job("SIGKILL", **ASYNC)
def test_a_rank_killed_inside_an_overlapped_product_is_named(run):
    run.wait_for_step(3)
    code, _, stderr = run.end(PROMPT)
    assert code == 1
    assert stderr.startswith(f"error: rank 1 (host {os.uname().nodename}, pid {run.pid(1)}) was killed by SIGKILL")
    assert "Traceback" not in stderr


@pytest.mark.slow
@job("SIGSTOP", **ASYNC)
def test_a_rank_stopped_inside_an_overlapped_product_is_named_with_the_operation(run):
    run.wait_for_step(3)
    code, _, stderr = run.end(25)
    assert code == 1, stderr
    assert re.search(r"no progress for \d+ s: rank 0 waits in all_gather over tp of \(16, 32\)", stderr)
    assert f"pid {run.pid(1)}) has not been heard of" in stderr


RING = {"parallelism.context_parallel_degree": 2, "parallelism.context_parallel_rotate_method": "ring"}


@pytest.mark.slow
@job("SIGSTOP", **RING)
def test_a_rank_stopped_inside_ring_attention_is_named_with_the_operation(run):
    run.wait_for_step(3)
    code, _, stderr = run.end(25)
    assert code == 1, stderr
    assert re.search(r"no progress for \d+ s: rank 0 waits in ring over cp of \(2, 512\) float32", stderr)
    assert f"pid {run.pid(1)}) has not been heard of" in stderr
