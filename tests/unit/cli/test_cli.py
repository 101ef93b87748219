"""The command line: exit codes, messages, what each command calls, and that it answers without torch."""

import json
import os
import subprocess
import sys
import tomllib
import types
from dataclasses import replace
from pathlib import Path

import pytest

from shardline import registry
from shardline.cli.commands import COMMANDS
from shardline.cli.main import called_as, dispatch
from shardline.errors import UserError
from shardline.run.options import TrainOptions

ROOT = Path(__file__).parents[3]


@pytest.fixture
def stub(monkeypatch):
    """Replace a module by one whose functions record their arguments and return 7."""

    def function(name, *functions):
        calls = []
        module = types.ModuleType(name)
        for each in functions:
            setattr(module, each, lambda *args, each=each, **named: calls.append((each, args, named)) or 7)
        monkeypatch.setitem(sys.modules, name, module)
        return calls

    return function


@pytest.mark.parametrize(
    "model", [["--preset=llama3_8b"], ["--model.flavor=1B"], ["--model.name=qwen3", "--model.flavor=0.6B"]]
)
def test_a_real_model_is_not_trained_on_generated_text_unasked(run, tmp_path, model):
    """Nor is it by way of the file that `shardline config` writes."""
    code, out, _ = run("config", *model)
    assert code == 0
    (tmp_path / "run.toml").write_text(out)
    for words in (model, [str(tmp_path / "run.toml")]):
        code, _, err = run("train", *words)
        assert code == 2
        assert "training.dataset: no data is named" in err
        assert "pass --training.dataset_path=PATH, or add two lines" in err
        assert '[training]\n         dataset_path = "data/*.jsonl"' in err


def test_help_and_version(run):
    for words in ([], ["--help"], ["-h"]):
        code, out, _ = run(*words)
        assert code == 0
        assert all(name in out for name in COMMANDS)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert run("--version")[1] == f"shardline {version}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_itself(run, name):
    code, out, _ = run(*name.split(), "--help")
    assert code == 0
    assert out.startswith(f"usage: shardline {name}")
    assert "examples:" in out
    assert "{" not in out
    for option in COMMANDS[name].options:
        assert f"--{option.name}" in out
    assert all(len(line) <= 120 for line in out.splitlines())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trian"], "there is no command 'trian', did you mean 'train'?"),
        (["data", "prepar"], "did you mean 'prepare'?"),
        (["train", "--resme"], "there is no option --resme, did you mean '--resume'?"),
        (["train", "--steps=3"], "did you mean '--training.steps'?"),
        (["train", "a.toml", "training.steps=3"], "argument 'training.steps=3', did you mean '--training.steps=3'?"),
        (["train", "--nproc", "many"], "--nproc: expected a whole number, 1 or more, got 'many'"),
        (["train", "--nproc=0"], "--nproc: expected a whole number, 1 or more, got '0'"),
        (["train", "--resume=maybe"], "--resume is a switch"),
        (["train", "--resume", "--overwrite"], "use only one of them"),
        (["train", "--world-size", "4"], "--world-size is for --dry-run"),
        (["train", "a.toml", "b.toml"], "unexpected argument 'b.toml'"),
        (["train", "nowhere.toml"], "nowhere.toml: there is no such file"),
        (
            ["train", "--preset", "demo", "--fault_tolerance.enable", "--fault_tolerance.process_group=nccl"],
            "is not built yet",
        ),
        (
            ["train", "--preset", "demo", "--fault_tolerance.enable"],
            "fault_tolerance.group_size = 0: the global batch covers all replica groups",
        ),
        (
            ["lighthouse", "--bind", "29510"],
            "--bind 29510: expected HOST:PORT",
        ),
        (["config", "--model.flavor=9B"], "command line: model.flavor = '9B': llama3 has no such flavor"),
        (["config", "--model.overrides.n_kv_heads=3"], "command line: model: n_kv_heads (3) must divide n_heads (16)"),
        (["config", "--training.epochs=1", "--training.steps=1"], "training.epochs: conflicts with"),
        (["config", "--diff", "demo"], "--diff needs 2 values: A B"),
        (["config", "--diff", "demo", "demo", "--training.steps=1"], "takes nothing else"),
        (["export", "a"], "OUT is missing"),
        (["export", "a", "b", "--format", "gguf"], "--format: expected one of hf, consolidated, got 'gguf'"),
        (["import", "a", "b", "--dtype"], "--dtype needs a value"),
        (["import", "a", "b", "--training.steps=1"], "there is no option --training.steps"),
        (["generate", "a"], "--prompt is missing"),
        (["generate", "a", "--prompt", "x", "--top-p", "1.5"], "--top-p: expected a number above 0, at most 1"),
    ],
)
def test_user_errors_exit_2_without_traceback(run, words, expected):
    code, out, err = run(*words)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert expected in err
    assert "Traceback" not in err


def test_help_states_defaults_of_nothing_too(run):
    _, out, _ = run("generate", "--help")
    assert "higher is more varied. Default: 0.0." in out
    assert "Seed of the sampling. Default: 0." in out


@pytest.mark.parametrize("width", [40, 80])
def test_help_on_a_terminal_breaks_lines_between_words(run, monkeypatch, width):
    helps = [["--help"], ["config", "--presets"], *([*name.split(), "--help"] for name in COMMANDS)]
    whole = [" ".join(run(*words)[1].split()) for words in helps]
    for module in ("main", "commands"):
        monkeypatch.setattr(f"shardline.cli.{module}.width_of", lambda stream: width)
    for words, text in zip(helps, whole, strict=True):
        lines = run(*words)[1].splitlines()
        assert " ".join(word for line in lines for word in line.removesuffix(" \\").split()) == text
        assert all(len(line) <= width or width < 80 for line in lines), words


@pytest.mark.parametrize("words", [[], ["--resume"], ["--nproc", "2"]])
def test_training_nothing_in_particular_is_refused(run, words):
    code, out, err = run("train", *words)
    assert (code, out) == (2, "")
    assert "--preset demo" in err


def test_debug_shows_the_traceback(run):
    code, _, err = run("config", "--training.steps=0", "--debug")
    assert code == 2
    assert "Traceback" in err
    assert "error: command line: training.steps" in err


def test_several_errors_are_listed(run):
    _, _, err = run("config", "--training.steps=0", "--training.seq_len=0")
    assert err.splitlines() == [
        "error: command line: training.seq_len: expected a whole number, 1 or more, got 0",
        "       command line: training.steps: expected a whole number, 1 or more, got 0",
    ]


def test_config_prints_toml_that_gives_the_same_output(run, tmp_path):
    code, out, err = run("config", "--preset", "demo", "--training.batch_size=3", "--validation.freq", "5")
    assert code == 0
    assert err.splitlines() == [
        "note: command line: training.batch_size is an older name of training.local_batch_size",
        "note: validation.freq has no effect: validation.enable is false",
    ]
    (tmp_path / "run.toml").write_text(out)
    assert run("config", str(tmp_path / "run.toml"))[1] == out


def test_config_diff_and_markdown(run, tmp_path):
    (tmp_path / "a.toml").write_text('extends = "demo"\n[training]\nsteps = 3\n')
    assert run("config", "--diff", "demo", str(tmp_path / "a.toml"))[1] == "training.steps: 200 -> 3\n"
    assert run("config", "--markdown")[1].startswith("# Configuration")
    assert "# int, default 10000. Optimizer steps to run." in run("config", "--comments")[1]


def test_unbuilt_models_are_marked_not_refused(run):
    code, out, _ = run("config", "--model.name=flux", "--model.flavor=flux-dev")
    assert code == 0
    assert 'name = "flux"  # not built yet: image generation' in out


def test_train_hands_over_config_and_options(run, stub, tmp_path):
    calls = stub("shardline.launch.launch", "train")
    file = tmp_path / "run.toml"
    file.write_text("[training]\nsteps = 3\n")
    words = ["--nproc_per_node=2", "--nnodes", "1:4", "--node-rank=1", "--rdzv-id", "x", "--rdzv_backend=c10d"]
    words += ["--rdzv-endpoint", "host:1", "--max-restarts=3", "--overwrite", "--compile.enable", str(file)]
    assert run("train", *words)[0] == 7
    [(_, (config, options), _)] = calls
    assert (config.training.steps, config.compile.enable) == (3, True)
    assert options == TrainOptions(
        overwrite=True,
        nproc=2,
        nnodes="1:4",
        node_rank=1,
        rdzv_id="x",
        rdzv_backend="c10d",
        rdzv_endpoint="host:1",
        max_restarts=3,
    )


def test_train_defaults_and_config_file_flag(run, stub, tmp_path):
    calls = stub("shardline.launch.launch", "train")
    (tmp_path / "run.toml").write_text("[training]\nsteps = 3\n")
    assert run("train", "--job.config_file", str(tmp_path / "run.toml"), "--training.steps", "4")[0] == 7
    assert calls[0][1][0].training.steps == 4
    assert calls[0][1][1] == TrainOptions()
    code, _, err = run("train", "a.toml", "--job.config_file", "b.toml")
    assert code == 2
    assert "two config files" in err


def test_dry_run_accepts_what_is_not_built(run, stub):
    calls = stub("shardline.tools.dry_run.dry_run", "describe")
    assert run("train", "--preset=llama3_70b", "--dry-run", "--world-size=256")[0] == 0
    assert calls[0][1][1:] == (256, None)


@pytest.mark.parametrize(
    ("words", "module", "function", "arguments", "named"),
    [
        (
            ["data", "prepare", "src", "out", "--tokenizer", "t", "--workers=2"],
            "shardline.data.prepare",
            "command",
            ("src", "out"),
            {"tokenizer": "t", "text_field": "text", "split": "train", "workers": 2, "overwrite": False},
        ),
        (
            ["import", "hf", "out", "--dtype=bfloat16"],
            "shardline.checkpoint.convert",
            "import_model",
            ("hf", "out"),
            {"dtype": "bfloat16", "overwrite": False, "trust_pickle": False, "config": None},
        ),
        (
            ["export", "--overwrite", "ck", "out", "--format", "consolidated"],
            "shardline.checkpoint.convert",
            "export",
            ("ck", "out"),
            {"format": "consolidated", "dtype": None, "overwrite": True, "max_shard_size": None}
            | {"merge": False, "base": None},
        ),
        (
            ["generate", "folder", "--prompt", "-x y", "--top-k=5", "--temperature", "0.5"],
            "shardline.tools.generate",
            "command",
            ("folder",),
            {"prompt": "-x y", "max_new_tokens": 100, "temperature": 0.5, "top_k": 5, "top_p": None, "seed": 0}
            | {"device": None, "tokenizer": None, "base": None},
        ),
    ],
)
def test_commands_call_their_function(run, stub, words, module, function, arguments, named):
    calls = stub(module, "import_model", "export", "command")
    assert run(*words)[0] == 7
    assert calls == [(function, arguments, named)]


def test_interrupt_exits_130(run, monkeypatch):
    def interrupted(parsed):
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "config", replace(COMMANDS["config"], run=interrupted))
    assert run("config") == (130, "", "interrupted\n")


def test_custom_module_brings_a_flavor(run, monkeypatch):
    monkeypatch.chdir(ROOT)
    for table in (registry.flavors, registry.sources, registry.optimizers):
        monkeypatch.setattr(registry, _name_of(table), dict(table))
    monkeypatch.setattr(registry, "hooks", {event: [] for event in registry.hooks})
    monkeypatch.delitem(sys.modules, "shardline_custom_custom_module", raising=False)
    words = ["--model.flavor=tiny", "--optimizer.name=PlainSGD"]
    assert run("config", *words)[0] == 2
    code, out, _ = run("config", *words, "--experimental.custom_import=examples/custom_module.py")
    assert code == 0
    assert 'flavor = "tiny"' in out
    assert "counting" in registry.sources
    assert all(len(functions) == 1 for functions in registry.hooks.values())
    sys.modules.pop("shardline_custom_custom_module", None)


def _name_of(table):
    return next(name for name, value in vars(registry).items() if value is table)


def test_custom_module_errors(run, tmp_path):
    code, _, err = run("config", f"--experimental.custom_import={tmp_path / 'no.py'}")
    assert code == 2
    assert "there is no such file" in err
    (tmp_path / "broken.py").write_text("x = 1\nraise ValueError('broken on purpose')\n")
    code, _, err = run("config", f"--experimental.custom_import={tmp_path / 'broken.py'}")
    assert code == 2
    assert "ValueError: broken on purpose" in err
    assert "broken.py:2" in err


def test_a_custom_module_that_is_not_there_is_named_with_its_place(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("[experimental]\ncustom_import = 'no.py'\n")
    code, _, err = run("config", "run.toml")
    assert (code, err) == (2, "error: run.toml:2: experimental.custom_import = 'no.py': there is no such file\n")


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("training.seq_len = 63 is not a multiple", "run.toml:2: training.seq_len = 63 is not a multiple"),
        ("job.dump_folder: cannot use it", "command line: job.dump_folder: cannot use it"),
        ("model.overrides.dim: too small", "run.toml:4: model.overrides.dim: too small"),
        ("run.toml:2: training.seq_len: odd", "run.toml:2: training.seq_len: odd"),  # as a rank says it
        ("command line: job.dump_folder: odd", "command line: job.dump_folder: odd"),
        ("training.steps: a default", "training.steps: a default"),
        ("training data is not there", "training data is not there"),
        ("model.toml is not there", "model.toml is not there"),
        ("", ""),
        (
            "training.seq_len: one\nmodel.overrides: two",
            "run.toml:2: training.seq_len: one\n       run.toml:4: model.overrides: two",
        ),
    ],
)
@pytest.mark.parametrize("started_by", ["training.trainer.Trainer", "launch.agent.start_ranks"])
def test_errors_of_a_run_name_the_place_of_their_key(run, tmp_path, monkeypatch, said, shown, started_by):
    def fail(*given):
        raise UserError(said)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"shardline.{started_by}", fail)
    Path("run.toml").write_text("[training]\nseq_len = 63\n[model.overrides]\ndim = 64\n")
    processes = "1" if started_by == "training.trainer.Trainer" else "2"
    code, _, err = run("train", "run.toml", "--job.dump_folder=x", "--nproc", processes)
    assert (code, err) == (2, f"error: {shown}\n")


def test_ranks_take_the_config_of_their_launcher(run, tmp_path, monkeypatch):
    checks, configs, file = [], [], tmp_path / "run.toml"
    monkeypatch.setattr("shardline.config.check.refusals", lambda config: checks.append(config) or ())

    def as_rank(launch):
        file.unlink()
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "SHARDLINE_LAUNCHER": "1"}
        for name, text in {**launch.environment, **address, "RANK": "0", "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, text)
        return dispatch(launch.words)

    def fail(config, options):
        configs.append(config)
        raise UserError("training.seq_len: odd")

    monkeypatch.setattr("shardline.launch.agent.start_ranks", as_rank)
    monkeypatch.setattr("shardline.training.trainer.Trainer", fail)
    file.write_text("[training]\nseq_len = 63\nbatch_size = 3\n")
    assert run("train", str(file), "--nproc", "2") == (2, "", f"error: {file}:2: training.seq_len: odd\n")
    (config,) = configs
    assert (config.training.seq_len, config.training.local_batch_size) == (63, 3)
    assert config.alias_notes == (f"{file}:3: training.batch_size is an older name of training.local_batch_size",)
    assert len(checks) == 3  # by the launcher at load and for 2 ranks, by the rank for 2 ranks


def in_process(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)


@pytest.mark.parametrize("words", [["--help"], ["config"], ["config", "--preset", "demo"], ["train", "--help"]])
def test_answers_without_torch(words):
    heavy = "{'torch', 'numpy', 'rich', 'yaml', 'transformers'}"
    done = in_process(
        f"import sys; from shardline.cli.main import main; main({words}); print({heavy} & set(sys.modules))"
    )
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


ABSURD = (
    ("model.overrides.dim=10000000", "model.overrides: the model would have 2,400,179,330,000,000 parameters"),
    ("training.seq_len=100000000000", "training.seq_len: 100,000,000,000 asks for 100,000,000,000 tokens at once"),
    ("training.local_batch_size=100000000000", "training.local_batch_size: 100,000,000,000 asks for 204,800,000,"),
    ("training.global_batch_size=100000000000", "training.global_batch_size: 100,000,000,000 asks for 204,800,000,"),
    ("training.gradient_accumulation_steps=99999999999", "training.gradient_accumulation_steps: 99,999,999,999 asks"),
    ("validation.local_batch_size=100000000000", "validation.local_batch_size: 100,000,000,000 asks for 204,800,"),
)


def test_absurd_sizes_are_refused_without_torch(tmp_path):
    folder = tmp_path / "absurd"
    folder.mkdir()
    sizes = {"hidden_size": 10**6, "num_hidden_layers": 9999, "num_attention_heads": 1000, "intermediate_size": 10**7}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300, **sizes}))
    words = [([f"--{flag}"], expected) for flag, expected in ABSURD]
    model = ["--model.name=auto", f"--model.hf_assets_path={folder}", "--model.tokenizer_path=bytes"]
    words.append((model, "model.hf_assets_path: the model would have 339,"))
    done = in_process(
        f"import sys; from shardline.cli.main import main; codes = [main(['train', *one]) for one, _ in {words}];"
        " print(set(codes), 'torch' in sys.modules)"
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.stdout, len(said)) == ("{2} False\n", len(words)), done.stderr
    assert [
        line for line, (_, expected) in zip(said, words, strict=True) if f"command line: {expected}" not in line
    ] == []


PYDANTIC = {"pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"}


@pytest.mark.parametrize(("words", "allowed", "most"), [(["--help"], set(), 200), (["config"], PYDANTIC, 400)])
def test_answers_quickly(words, allowed, most):
    """The time of an answer is that of its imports, and their number does not depend on how busy the machine is."""
    done = in_process(
        "import sys; before = set(sys.modules); from shardline.cli.main import main;"
        f" main({words}); print(*set(sys.modules) - before)"
    )
    loaded = done.stdout.splitlines()[-1].split()
    packages = {name.partition(".")[0] for name in loaded if not name.startswith("_")} - sys.stdlib_module_names
    assert packages == {"shardline"} | allowed, done.stderr
    assert len(loaded) < most


def test_lazy_names_of_the_package():
    names = "load_config, Config, register_flavor, register_source, register_optimizer, register_hook, __version__"
    done = in_process(f"import sys; from shardline import {names}; print('torch' in sys.modules)")
    assert done.stdout == "False\n", done.stderr
    assert "has no attribute 'nothing'" in in_process("import shardline; shardline.nothing").stderr


def test_broken_pipe_is_quiet():
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "shardline", "config"]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_train_as_a_module():
    words = [sys.executable, "-m", "shardline.train", "--job.config_file", "nowhere.toml"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (2, "error: nowhere.toml: there is no such file\n")


HANGING = """
import sys, threading, time
from shardline.cli import main as cli

class Last:
    def __del__(self):
        print("destructors ran", flush=True)

last = Last()

def dispatch(given):
    threading.Thread(target=time.sleep, args=(60,), name=sys.argv[1], daemon=True).start()
    print("said", end="")
    return 3

cli.dispatch = dispatch
sys.exit(cli.program() if sys.argv[2] == "program" else cli.main([]))
"""


@pytest.mark.parametrize(
    ("thread", "entry", "said"),
    [
        ("shardline-store", "program", "said"),
        ("another", "program", "saiddestructors ran\n"),
        ("shardline-store", "main", "saiddestructors ran\n"),  # whoever calls the command as a function lives on
    ],
)
def test_a_thread_that_hangs_in_the_store_does_not_abort_the_end(thread, entry, said):
    done = subprocess.run([sys.executable, "-c", HANGING, thread, entry], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, said), done.stderr


def test_commands_in_messages_name_the_program_as_the_user_calls_it(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "shardline"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    assert called_as("bin/shardline") == "bin/shardline"
    assert called_as(str(program)) == "bin/shardline"
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert called_as(str(program)) == str(program)
    monkeypatch.setenv("PATH", str(program.parent))
    assert called_as(str(program)) == "shardline"
    assert called_as("/somewhere/shardline/__main__.py") == f"{sys.executable} -m shardline"
    assert called_as("/somewhere/shardline/train.py") == "shardline"
