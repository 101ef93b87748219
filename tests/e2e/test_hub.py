"""Models and data by their names on the Hub, against a server on this machine that speaks its protocol."""

import json
import os
import re
import tomllib
from collections import Counter

import pytest

from tests.e2e.hf_folders import write_model
from tests.e2e.tiny import command, rows
from tests.hub_server import TOKEN, Repository, serving

pytest.importorskip("huggingface_hub")
SMALL = ["--training.steps=2", "--training.seq_len=32", "--training.local_batch_size=2", "--metrics.log_freq=1"]
LOADS = ["--model.name=auto", "--checkpoint.enable", "--checkpoint.initial_load_in_hf"]
NOWHERE = {"endpoint": "http://127.0.0.1:1"}  # nobody listens there
TEXT = "".join(json.dumps({"text": f"the green bottle {number} on the wall"}) + "\n" for number in range(200)).encode()
TASKS = "".join(
    json.dumps({"instruction": f"Add {number} and 1.", "output": str(number + 1)}) + "\n" for number in range(60)
).encode()
CARD = b"---\nconfigs:\n- config_name: tasks\n  data_files:\n  - {split: train, path: tasks/*.jsonl}\n---\n"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("hub") / "model", "Llama")


@pytest.fixture
def hub(model_folder):
    files = {path.name: path.read_bytes() for path in model_folder.iterdir()}
    extra = {"README.md": b"# A model", "consolidated.safetensors": b"a copy", "onnx/model.safetensors": b"another"}
    data = {"data/a.jsonl": TEXT, "data/b.jsonl": TEXT + TEXT, "data/deep/c.jsonl": TEXT * 3, "README.md": b"# Text"}
    tasks = {"README.md": CARD, "tasks/a.jsonl": TASKS, "no/b.jsonl": b"{"}
    with serving() as hub:
        hub.repositories["models/Owner/Small"] = Repository({**files, **extra})
        hub.repositories["models/Owner/Gated"] = Repository(files, gated=True)
        hub.repositories["models/Owner/Secret"] = Repository(files, private=True)
        hub.repositories["datasets/Owner/Text"] = Repository(data)
        hub.repositories["datasets/Owner/Tasks"] = Repository(tasks)
        yield hub


@pytest.fixture
def shardline(tmp_path, hub):
    """Run a command in a folder of its own, with a cache of its own."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    places = {"HF_HOME": str(tmp_path / "hf"), "SHARDLINE_CACHE": str(tmp_path / "cache")}

    def run(*words, endpoint=hub.address, **environment):
        given = {**kept, **places, "HF_ENDPOINT": endpoint, **environment}
        return command(*map(str, words), cwd=tmp_path, env=given)

    return run


def refusal(done):
    """The one line of a command that was refused."""
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.stderr.splitlines()[-1] == line
    assert "Traceback" not in done.stderr
    assert TOKEN not in done.stdout + done.stderr
    return line


def test_ranks_train_on_what_their_launcher_downloaded(tmp_path, hub, shardline, model_folder):
    """Each file travels once; the run is that of local files; its config has commits, and repeats it without a Hub."""
    named = ["--model.hf_assets_path=Owner/Small@v1", "--training.dataset_path=hf://datasets/Owner/Text/data/*.jsonl"]
    done = shardline("train", *SMALL, *LOADS, *named, "--nproc=2", "--job.dump_folder=run", HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    sent = Counter(hub.downloads())
    assert set(sent.values()) == {1}
    assert sent.keys() >= {"config.json", "tokenizer.json", "model.safetensors", "data/a.jsonl", "data/b.jsonl"}
    assert not sent.keys() & {"README.md", "consolidated.safetensors", "onnx/model.safetensors", "data/deep/c.jsonl"}
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert config["model"]["hf_assets_path"] == f"Owner/Small@{hub.repositories['models/Owner/Small'].commit}"
    commit = hub.repositories["datasets/Owner/Text"].commit
    assert config["training"]["dataset_path"] == f"hf://datasets/Owner/Text@{commit}/data/*.jsonl"
    assert "Owner/Small, " in done.stdout  # as the log names the model
    written = [file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert not any(TOKEN.encode() in content for content in (*written, done.stdout.encode(), done.stderr.encode()))

    (tmp_path / "local").mkdir()
    for name in ("a", "b"):
        content = hub.repositories["datasets/Owner/Text"].files[f"data/{name}.jsonl"]
        (tmp_path / "local" / f"{name}.jsonl").write_bytes(content)
    local = [f"--model.hf_assets_path={model_folder}", "--training.dataset_path=local/*.jsonl"]
    assert shardline("train", *SMALL, *LOADS, *local, "--nproc=2", "--job.dump_folder=same").returncode == 0
    losses = [row["loss"] for row in rows(tmp_path / "run")]
    assert [row["loss"] for row in rows(tmp_path / "same")] == losses

    before = len(hub.requests)
    again = shardline("train", "run/config.toml", "--nproc=2", "--job.dump_folder=again", **NOWHERE)
    assert again.returncode == 0, again.stderr
    assert len(hub.requests) == before
    assert [row["loss"] for row in rows(tmp_path / "again")] == losses


def test_a_second_start_needs_no_network(hub, shardline):
    words = ["train", *LOADS, "--model.hf_assets_path=Owner/Small", "--dry-run"]
    assert shardline(*words).returncode == 0
    assert "model.safetensors" not in hub.downloads()  # a dry run has no need of it
    for options in (NOWHERE, {"HF_HUB_OFFLINE": "1"}):
        offline = shardline(*words, **options)
        assert offline.returncode == 0, offline.stderr
        assert "Owner/Small on 1 rank" in offline.stdout


BY_HAND = "where there is a network, `hf download Owner/Small` fills "


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        (["Owner/Gated"], {}, "model of that name is gated: ask for access on its page, then log in with `hf auth"),
        (["Owner/Secret"], {}, "model of that name does not exist or is private: check the name, or log in"),
        (["Owner/Nothing"], {}, "there is no folder 'Owner/Nothing', and the Hub's model of that name does not exist"),
        (["Owner/Small@v9"], {}, "the Hub's model of that name has no revision 'v9'"),
        (["Owner/Small"], NOWHERE, f"and the Hub cannot be reached; {BY_HAND}"),
        (["Owner/Small"], {"HF_HUB_OFFLINE": "1"}, f"and HF_HUB_OFFLINE is set; {BY_HAND}"),
        (
            ["Owner/Small", "--training.dataset_path=hf://datasets/Owner/Text/none/*.jsonl"],
            {},
            "the dataset Owner/Text has no file none/*.jsonl at main",
        ),
        (["Owner/Small", "--training.dataset=Owner/Nothing"], {}, "the Hub's dataset Owner/Nothing does not exist"),
        (["Owner/Small", "--training.dataset=Owner/Tasks:other"], {}, "no configuration 'other'; name one of tasks"),
    ],
)
def test_what_cannot_be_downloaded_is_one_line(shardline, words, environment, expected):
    assets, *more = words
    line = refusal(shardline("train", *SMALL, *LOADS, f"--model.hf_assets_path={assets}", *more, **environment))
    assert re.match(r"error: command line: (model.hf_assets_path|training.dataset(_path)?): ", line)
    assert expected in line


def test_a_token_opens_what_is_gated(shardline):
    for name in ("Owner/Gated", "Owner/Secret"):
        done = shardline("train", *LOADS, f"--model.hf_assets_path={name}", "--dry-run", HF_TOKEN=TOKEN)
        assert done.returncode == 0, done.stderr
        assert TOKEN not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_download_that_breaks_is_continued_by_the_next_start(hub, shardline):
    words = ["train", *SMALL, *LOADS, "--model.hf_assets_path=Owner/Small", "--job.dump_folder=run"]
    hub.breaks["model.safetensors"] = 1000
    line = refusal(shardline(*words))
    assert "was not downloaded: the connection broke (" in line
    assert "the same command resumes it" in line
    line = refusal(shardline(*words, HF_HUB_OFFLINE="1"))  # half of a model is none
    assert "is not in the cache, or not all of it" in line
    hub.breaks.clear()
    assert shardline(*words).returncode == 0


def test_a_tokenizer_comes_without_weights(hub, shardline):
    fields = ("dim=32", "n_layers=1", "n_heads=4", "ffn_dim=48", "vocab_size=320")
    words = [*SMALL, *(f"--model.overrides.{field}" for field in fields), "--model.hf_assets_path=Owner/Small"]
    data = "--training.dataset_path=hf://datasets/Owner/Text/data/a.jsonl"
    done = shardline("train", *words, data, "--job.dump_folder=run")
    assert done.returncode == 0, done.stderr
    assert "tokenizer.json" in hub.downloads()
    assert "model.safetensors" not in hub.downloads()


def test_a_local_folder_of_that_name_wins(tmp_path, hub, shardline, model_folder):
    (tmp_path / "Owner").mkdir()
    (tmp_path / "Owner" / "Small").symlink_to(model_folder)
    assert shardline("train", *LOADS, "--model.hf_assets_path=Owner/Small", "--dry-run").returncode == 0
    assert hub.requests == []


AXOLOTL = """
base_model: Owner/Small
datasets:
  - path: Owner/Tasks
    name: tasks
    type: alpaca
sequence_len: 512
micro_batch_size: 2
max_steps: 2
learning_rate: 1e-3
output_dir: out
"""


def test_an_axolotl_config_names_its_model_and_its_data(tmp_path, hub, shardline):
    (tmp_path / "run.yml").write_text(AXOLOTL)
    done = shardline("train", "run.yml", "--metrics.log_freq=1")
    assert done.returncode == 0, done.stderr
    assert "no/b.jsonl" not in hub.downloads()  # the card says nothing of it
    config = tomllib.loads((tmp_path / "out" / "config.toml").read_text())
    commit = hub.repositories["datasets/Owner/Tasks"].commit
    source = {"path": f"hf://datasets/Owner/Tasks@{commit}", "data_files": ["tasks/*.jsonl"], "type": "alpaca"}
    assert config["data"]["sources"] == [source]
    assert len(rows(tmp_path / "out")) == 2


@pytest.mark.slow
def test_commands_take_names_too(tmp_path, shardline):
    done = shardline("data", "prepare", "hf://datasets/Owner/Text/data/a.jsonl", "store", "--tokenizer", "Owner/Small")
    assert done.returncode == 0, done.stderr
    assert "200 documents" in done.stdout
    done = shardline("data", "prepare", "hf://datasets/Owner/Text", "whole")  # its card is not among its texts
    assert done.returncode == 0, done.stderr
    assert "1,200 documents" in done.stdout
    done = shardline("import", "Owner/Small", "imported")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "imported" / "manifest.json").is_file()
