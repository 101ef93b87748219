"""Starting ranks without starting any: options, whose failure is shown, cores, NCCL variables, kept output."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardline.cli.main import main
from shardline.config.load import load_config
from shardline.errors import ConfigError, UserError
from shardline.launch.agent import Agent, Launch, RoundStatus
from shardline.launch.failures import choose_cause, show
from shardline.launch.rank_main import run
from shardline.launch.rounds import End
from shardline.report import Report, read_report, report_of, write_report
from shardline.run import attempt, enforcer
from shardline.run import numa as binding
from shardline.run.numa import nccl_variables, numa_nodes, prepare_rank, share_cores
from shardline.run.options import TrainOptions

BYTES, ONE = "--model.tokenizer_path=bytes", ("--training.local_batch_size=1",)


@pytest.fixture(autouse=True)
def no_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nnodes", "0"], "--nnodes: expected N or MIN:MAX"),
        (["--nnodes", "2:1"], "--nnodes: expected N or MIN:MAX"),
        (["--nnodes", "1:4", "--rdzv-endpoint", "h:1"], "machines that come and go need --rdzv-backend c10d"),
        (["--nnodes", "1:4"], "--nnodes 4 needs --rdzv-endpoint HOST:PORT"),
        (["--nnodes", "2"], "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
        (["--nnodes", "2", "--rdzv-endpoint", "host"], "got 'host'"),
        (["--nnodes", "2", "--rdzv-endpoint", "h:1", "--rdzv-backend", "etcd"], "expected one of static, c10d"),
        (["--nnodes", "2", "--rdzv-endpoint", "h:1", "--node-rank", "2"], "--node-rank 2"),
        (
            ["--nnodes", "1:2", "--nproc", "2", "--parallelism.tensor_parallel_degree", "3"],
            "does not match 4 ranks",
        ),
        (["--nproc", "3", "--parallelism.tensor_parallel_degree", "2"], "does not match 3 ranks"),
        (["--nproc=2", "--training.global_batch_size=7"], "training.global_batch_size = 7 does not divide"),
        (["--nproc=3", "--parallelism.tensor_parallel_degree=3"], "16 heads cannot be shared by 3 ranks"),
        (["--nproc=2", "--parallelism.tensor_parallel_degree=2", "--training.seq_len=63", *ONE], "1 x 63 = 63 tokens"),
        (["--nproc=2", "--parallelism.context_parallel_degree=2", "--training.seq_len=6"], "is not a multiple of 2 x"),
        (["--nproc=9", "--parallelism.pipeline_parallel_degree=9", *ONE], "cannot make 9 pipeline stages"),
        (["--nproc=2", "--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=3",
          "--parallelism.pipeline_parallel_microbatch_size=2"], "does not divide training.local_batch_size = 3"),
        (["--nproc=2", "--model.tokenizer_path=nothing"], "no tokenizer at 'nothing'"),
        (["--nproc=2", "--model.overrides.vocab_size=200"], "set --model.overrides.vocab_size=258"),
        (["--nproc=2", "--training.dataset_path=none.txt", BYTES], "there is no file or folder 'none.txt'"),
        (["--nproc=2", "--training.dataset_path=.", BYTES], "training.dataset_path: the folder '.' is empty"),
        (["--nproc=2", "--training.dataset=c4", BYTES], "training.dataset: dataset 'c4' needs a path"),
        (["--nproc=2", "--data.sources", '[{path="no.jsonl"}]', BYTES], "data.sources[0]: there is no file or folder"),
        (["--nproc=2", "--lora.enable", "--lora.target_modules=nothing"], "lora.target_modules: "),
        (["--nproc=2", "--training.unfrozen_parameters=nothing"], "'nothing' matches no weight of this model"),
        (["--nproc=2", "--compile.enable", "--compile.backend=inducter"], "did you mean 'inductor'?"),
        (["--nproc=2", "--resume", "--checkpoint.enable"], "--resume needs the folder of the run to continue"),
        (["--nproc=2", "--resume", "--checkpoint.enable", "--job.dump_folder=no"], "--resume: there is no folder no"),
        (["--nproc=2", "--job.dump_folder", "old"], "old already holds a run (metrics.jsonl) and checkpoint.enable is"),
        (["--nproc=2", "--metrics.enable_wandb"], "metrics.enable_wandb: true needs the package wandb"),
        (["--nproc=2", "--model.name=mixtral", "--training.mixed_precision_param=float16"], "losses that balance"),
    ],
)  # fmt: skip
def test_what_cannot_start_is_refused_before_anything_starts(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shardline.launch.agent.start_ranks", lambda launch: pytest.fail("ranks were started"))
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    monkeypatch.chdir(tmp_path)
    if "old" in words:
        (tmp_path / "old").mkdir()
        (tmp_path / "old" / "metrics.jsonl").write_text("{}\n")
    assert main(["train", "--training.steps=1", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("error:") == 1


def test_every_rank_gets_the_same_command_line(monkeypatch):
    seen = []
    monkeypatch.setattr("shardline.launch.agent.start_ranks", lambda launch: seen.append(launch) or 0)
    words = ["train", "--nproc", "2", "--nnodes", "2", "--rdzv-endpoint", "h:1", "--comm.stop_timeout_seconds", "7"]
    assert main(words) == 0
    (launch,) = seen
    assert launch.words == tuple(words)
    assert (launch.options.nproc, launch.terms().most, launch.stop_timeout_seconds) == (2, 2, 7)


def test_a_rank_does_not_start_ranks(monkeypatch):
    """Under torchrun, too, where the number of processes is given to torchrun."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("shardline.launch.agent.start_ranks", lambda launch: pytest.fail("ranks were started"))
    monkeypatch.setattr("shardline.launch.launch._run", lambda config, options: 42)
    assert main(["train", "--nproc", "4"]) == 42


def failure(kind, rank, at=0.0, text=""):
    return Report(kind, rank, "h", 1, text, "", at)


@pytest.mark.parametrize(
    ("reports", "rank"),
    [
        ([failure("lost_peer", 0, 1.0), failure("error", 1, 2.0)], 1),
        ([failure("error", 0, 2.0), failure("user", 1, 1.0)], 1),
        ([failure("lost_peer", 0, 1.0), failure("signal", 1, 5.0, "SIGSEGV")], 1),
        ([failure("error", 0, 1.0), failure("signal", 1, 5.0, "SIGABRT")], 0),
        ([failure("error", 0, 1.0), failure("signal", 1, 5.0, "SIGKILL")], 1),
        ([failure("lost_peer", 0, 1.0), failure("exit", 1, 5.0, "7")], 1),
        ([failure("lost_peer", 0, 2.0), failure("lost_peer", 1, 1.0)], 1),
        ([failure("lost_peer", 0, 1.0), failure("hang", 1, 2.0)], 1),
        ([failure("hang", 0, 2.0), failure("exit", 1, 1.0, "7")], 0),
        ([failure("lost_peer", 0, 1.0), failure("machine", 1, 2.0)], 1),
    ],
)
def test_the_failure_that_others_followed_from_is_shown(reports, rank):
    assert choose_cause(reports).rank == rank
    assert choose_cause(reports[::-1]).rank == rank


def test_a_report_keeps_an_error_and_tells_a_lost_peer_from_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDLINE_REPORT", str(tmp_path / "report.json"))
    monkeypatch.setenv("RANK", "3")
    assert write_report(report_of(ValueError("its own")))
    report = read_report(tmp_path / "report.json")
    assert (report.kind, report.rank, report.pid, report.text) == ("error", 3, os.getpid(), "ValueError: its own")
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer.")
    assert report_of(lost).kind == "lost_peer"
    assert report_of(UserError("Connection closed")).kind == "user"
    assert read_report(tmp_path / "none.json") is None


def test_a_rank_turns_what_it_did_not_handle_into_exit_codes(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDLINE_REPORT", str(tmp_path / "report.json"))
    codes = {"users": 2, "bug": 1, "interrupted": 143, "exits": 5, "fine": 0}
    assert {name: run(f"tests.unit.launch.test_launch:{name}", ()) for name in codes} == codes
    assert read_report(tmp_path / "report.json").text == "IndexError: list index out of range"


def users(words):
    raise UserError("mend it")


def bug(words):
    return [][0]


def interrupted(words):
    raise KeyboardInterrupt(15)


def exits(words):
    sys.exit(5)


def fine(words):
    return 0


def test_an_error_of_the_user_is_raised_again_by_the_launcher():
    with pytest.raises(UserError, match="mend it"):
        show(Report("user", 1, "h", 1, "mend it"))


@pytest.fixture
def agent(tmp_path):
    """A launcher that has started nothing, with room for the ranks and the job of a test."""
    agent = Agent(Launch("module:function", (), TrainOptions(), lost_machine_seconds=10.0), tmp_path)
    agent.notes = {"first_step": 1.0}
    return agent


def ended(*codes):
    return [SimpleNamespace(number=number, code=code, poll=lambda: None) for number, code in enumerate(codes)]


@pytest.mark.parametrize(("codes", "said"), [((143, -9), True), ((143, 143), False), ((0, 1), True)])
def test_ranks_that_the_stop_of_another_machine_cut_short_end_like_a_stop(agent, codes, said, capsys):
    agent.ranks, agent.stopping_for = ended(*codes), End(failure("stop", -1, text="host b stops (SIGINT)"))
    assert agent.exit_code() == 143
    message = "error: stopped in the middle of a step: host b stops (SIGINT)\n"
    assert capsys.readouterr().err == (message if said else "")


@pytest.mark.parametrize(
    ("codes", "silent", "status"),
    [((0, 0), 11.0, RoundStatus.OVER), ((0, 0), 9.0, RoundStatus.RUNNING), ((0, None), 11.0, RoundStatus.RUNNING)],
)
def test_a_finished_machine_ends_when_the_store_is_gone(agent, codes, silent, status):
    agent.ranks = ended(*codes)
    agent.rendezvous = SimpleNamespace(end=None, cut_off=False, silent_seconds=silent, is_done=lambda: False)
    assert agent._watch() is status


@pytest.mark.parametrize("preempted", [75, 143])
def test_a_hang_is_a_failure_whatever_the_code_of_a_preemption(tmp_path, preempted):
    agent = Agent(Launch("module:function", (), TrainOptions(), preempted_exit_code=preempted), tmp_path)
    hung = SimpleNamespace(code=75, written_report=lambda: failure("hang", 0, text="rank 1 is missing"))
    stopped = SimpleNamespace(code=preempted, written_report=lambda: None)
    assert agent._has_failed(hung)
    assert not agent._has_failed(stopped)


def test_ranks_that_save_get_the_time_of_a_save_once(tmp_path, monkeypatch):
    agent = Agent(Launch("module:function", (), TrainOptions(), save_timeout_seconds=600.0), tmp_path)
    agent.notes_file = tmp_path / "notes.json"
    monkeypatch.setattr(enforcer, "_saves", 0)  # runs in this process may have ended in their last save
    monkeypatch.setenv(attempt.VARIABLE, json.dumps({"notes": str(agent.notes_file)}))
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert not agent._give_more_time(), "no save is under way"
    attempt.note("first_step")
    with enforcer.saving():
        assert agent._give_more_time()
        assert agent.kill_at > time.monotonic() + 590
        assert not agent._give_more_time(), "only once"
        agent.gave_more, agent.forwarded = False, 2
        assert not agent._give_more_time(), "a second signal does not wait"
    agent.forwarded = 1
    assert not agent._give_more_time(), "the save has ended"
    assert "first_step" in attempt.read(agent.notes_file)


def test_what_a_rank_printed_is_kept_in_the_log_folder(tmp_path):
    output, kept = tmp_path / "rank-1.out", tmp_path / "log" / "rank-1.out.log"
    kept.parent.mkdir()
    code = (
        "import os; from pathlib import Path; from shardline.run.output import keep_output;"
        f"print('before'); keep_output(Path({str(kept.parent)!r})); print('after'); os.system('echo child')"
    )
    environment = {**os.environ, "RANK": "1", "SHARDLINE_OUTPUT": str(output)}
    with output.open("wb") as file:
        subprocess.run([sys.executable, "-u", "-c", code], stdout=file, env=environment, check=True)
    assert kept.read_text() == output.read_text() == "before\nafter\nchild\n"
    assert output.is_symlink()


# Cores and NCCL


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_cores_are_shared_out_without_rest_or_overlap(ranks):
    nodes = {0: {0, 1, 2, 3}, 1: {4, 5, 6, 7}}
    shares = [share_cores(nodes, [None] * ranks, rank) for rank in range(ranks)]
    assert sorted(core for share in shares for core in share) == list(range(8))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_ranks_run_on_the_node_of_their_gpu():
    nodes = {0: {0, 1, 2, 3}, 1: {4, 5, 6, 7}}
    assert [share_cores(nodes, [1, 1, 0], rank) for rank in range(3)] == [[4, 5], [6, 7], [0, 1, 2, 3]]


def test_more_ranks_than_cores_take_turns():
    assert [share_cores({0: {4, 6}}, [None] * 3, rank) for rank in range(3)] == [[4], [6], [4]]


def test_numa_nodes_are_read_from_the_kernel(tmp_path):
    for node, cores in (("node0", "0-2,8\n"), ("node1", "\n"), ("node10", "5\n")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cores)
    assert numa_nodes(tmp_path) == {0: {0, 1, 2, 8}, 10: {5}}
    assert numa_nodes(tmp_path / "none") == {}


def test_a_rank_is_bound_and_says_so(monkeypatch):
    bound = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(binding, "NODES", Path("/nonexistent"))
    monkeypatch.setattr(binding, "gpu_nodes", lambda ranks: [None] * ranks)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    assert prepare_rank(load_config(overrides={"comm.bind_cpus": True})) == ["bound to cores 2-3 of NUMA node 0"]
    assert bound == [[2, 3]]
    assert prepare_rank(load_config()) == []
    assert len(bound) == 1


def test_nccl_settings_become_variables_and_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    file = tmp_path / "run.toml"
    file.write_text('[comm.nccl]\nalgorithm = "Ring"\nmax_channels = 8\nbuffer_size = 1048576\nnet_gdr_level = "PHB"\n'
                    'protocol = "LL128"\nmin_channels = 4\n'
                    '[comm.nccl.env]\nNCCL_DEBUG = "INFO"\nNCCL_ALGO = "Tree"\n')  # fmt: skip
    config = load_config(file)
    expected = {
        "NCCL_ALGO": "Tree",
        "NCCL_PROTO": "LL128",
        "NCCL_MIN_NCHANNELS": "4",
        "NCCL_MAX_NCHANNELS": "8",
        "NCCL_BUFFSIZE": "1048576",
        "NCCL_NET_GDR_LEVEL": "PHB",
        "NCCL_DEBUG": "INFO",
    }
    assert nccl_variables(config.comm.nccl) == expected
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (line,) = prepare_rank(config)
    assert line.startswith("NCCL settings: NCCL_ALGO=Tree, ")
    assert line.endswith("NCCL_DEBUG=INFO (no effect: there is no GPU)")
    assert os.environ["NCCL_BUFFSIZE"] == "1048576"


def test_only_variables_of_nccl_may_be_set():
    with pytest.raises(ConfigError, match="names begin with NCCL_"):
        load_config(overrides=["--comm.nccl.env", '{PATH = "/"}'])
