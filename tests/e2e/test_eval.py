"""`shardline eval`: the loss of the run's own validation, perplexity of files, tasks as the harness has them."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from shardline.cli.main import main
from shardline.data.tokenizer import ByteTokenizer
from shardline.tools.saved_model import open_model
from shardline.tools.tasks import MISSING, answer, log_likelihoods
from tests.e2e.tiny import command, run

transformers = pytest.importorskip("transformers")
from tests.e2e.hf_folders import write_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_cpu")

TEXT = "the green bottle on the wall, and a sea of ice. " * 40


@pytest.fixture(scope="module")
def validated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run on bytes that validates on a file, and its last validation loss."""
    place = tmp_path_factory.mktemp("validated")
    (place / "train.txt").write_text("a sea of ice and a wall of green. " * 80)
    (place / "held_out.txt").write_text(TEXT)
    rows = run(
        place / "run",
        training__dataset_path=str(place / "train.txt"),
        training__cache_folder=str(place / "cache"),
        validation__enable=True,
        validation__dataset_path=str(place / "held_out.txt"),
        validation__seq_len=32,
        validation__local_batch_size=4,
        validation__steps=6,
        model__tokenizer_path="bytes",
        checkpoint__enable=True,
    )
    return place, [row["validation_loss"] for row in rows if "validation_loss" in row][-1]


def evaluated(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict:
    assert main(["eval", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_validation_of_a_run_is_repeated_bit_by_bit(validated, capsys) -> None:
    place, loss = validated
    found = evaluated(capsys, place / "run")
    assert found["loss"] == loss
    assert found["perplexity"] == math.exp(loss)
    assert (found["step"], found["target_tokens"]) == (6, 6 * 4 * 32)


def test_a_file_is_read_whole_and_as_validation_reads_it(validated, capsys) -> None:
    place, loss = validated
    whole = evaluated(capsys, place / "run" / "checkpoint" / "step-6", "--data", place / "held_out.txt")
    assert whole["target_tokens"] == len(TEXT) // 32 * 32
    assert whole["loss"] != loss
    longer = evaluated(capsys, place / "run", "--data", place / "held_out.txt", "--validation.seq_len=64")
    assert longer["seq_len"] == 64


@pytest.mark.slow
def test_two_ranks_give_the_loss_of_one(validated) -> None:
    place, loss = validated
    done = command("eval", str(place / "run"), "--nproc", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["target_tokens"] == 6 * 4 * 32
    assert found["loss"] == pytest.approx(loss, rel=1e-7)


def test_a_hugging_face_folder_has_the_loss_of_transformers(tmp_path, capsys) -> None:
    folder = write_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    keys = ("--validation.seq_len=64", "--validation.local_batch_size=2", f"--training.cache_folder={tmp_path}")
    found = evaluated(capsys, folder, "--data", tmp_path / "text.txt", *keys)
    ids = [0, *transformers.AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    losses = []
    for start in range(0, found["target_tokens"], 64):
        row = torch.tensor([ids[start : start + 65]])
        with torch.no_grad():
            logits = model(row[:, :-1]).logits
        losses.append(torch.nn.functional.cross_entropy(logits[0], row[0, 1:]))
    assert found["loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "a", "--data", "b"], "--data is for a file of data, --tasks for tasks"),
        (["--limit", "3"], "--limit is for tasks: add --tasks"),
        (["--training.steps", "3"], "there is no option --training.steps"),
        (["--data", "nothing.txt"], "nothing.txt"),
    ],
)
def test_what_cannot_be_evaluated_is_said(validated, capsys, words, message) -> None:
    assert main(["eval", str(validated[0] / "run"), *words]) == 2
    assert message in capsys.readouterr().err


def test_without_the_package_one_line_says_how_to_install_it(validated, capsys, monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find(name))
    assert main(["eval", str(validated[0] / "run"), "--tasks", "a"]) == 2
    assert capsys.readouterr().err == f"error: {MISSING}\n"


def test_log_likelihoods_of_a_batch_are_those_of_each_alone(tmp_path) -> None:
    model = open_model(write_model(tmp_path / "model")).build(torch.device("cpu"))
    pairs = [([0, 40, 50], [60, 70]), ([0], [80]), ([0, *range(20, 40)], [9, 8, 7])]
    cut = ([0, *range(20, 60)], [9, 8])  # more than `longest` tokens: its beginning is left out
    found = log_likelihoods(model, [*pairs, cut], 30, 2, torch.device("cpu"))
    for (context, continuation), (score, likely) in zip([*pairs, cut], found, strict=True):
        row = torch.tensor([(context + continuation)[-31:]])
        with torch.no_grad():
            chosen = model(row[:, :-1])[0].log_softmax(-1)[-len(continuation) :]
        assert score == pytest.approx(float(chosen[range(len(continuation)), continuation].sum()), rel=1e-5)
        assert likely == (chosen.argmax(-1).tolist() == continuation)


def test_an_answer_ends_where_the_task_says(validated) -> None:
    place, _ = validated
    saved = open_model(place / "run")
    words, model = ByteTokenizer(), saved.build(torch.device("cpu"))
    whole = answer(model, words, [], "a sea", {"max_gen_toks": 12, "temperature": 0.0})
    assert len(whole) == 12
    end = whole[5]
    assert answer(model, words, [], "a sea", {"max_gen_toks": 12, "until": [end]}) == whole.split(end)[0]


TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: answer
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "answers": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: [" "], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


@pytest.mark.slow
def test_tasks_have_the_results_of_the_harness_itself(tmp_path, capsys) -> None:
    """Its own model class computes the same folder with transformers."""
    pytest.importorskip("lm_eval")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    folder, questions = write_model(tmp_path / "model"), tmp_path / "questions.jsonl"
    rows = [
        {"question": f"the {one} on", "choices": [" the wall", " a hill", f" {one}"], "answer": number % 3}
        for number, one in enumerate(["green", "bottle", "wall", "hill", "grüner", "Hügel", "ein", "緑", "丘"])
    ]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        data = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {questions}}}\ntest_split: train\n"
        (tmp_path / f"{name}.yaml").write_text(data + text)
    words = ["--tasks", ",".join(TASKS), "--include-path", str(tmp_path), "--out", str(tmp_path / "out.json")]
    assert main(["eval", str(folder), *words, "--batch-size", "4"]) == 0
    assert "choices" in capsys.readouterr().out
    ours = json.loads((tmp_path / "out.json").read_text())["results"]
    manager = TaskManager(include_path=str(tmp_path))
    model = {"pretrained": str(folder), "dtype": "float32", "device": "cpu"}
    theirs = simple_evaluate(model="hf", model_args=model, tasks=list(TASKS), task_manager=manager)["results"]
    assert {row["task"] for row in ours} == set(TASKS)
    for row in ours:
        wanted = theirs[row["task"]][f"{row['metric']},{row['filter']}"]
        assert row["value"] == pytest.approx(wanted, rel=1e-4), row
