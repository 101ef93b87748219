"""Formats of records: prompts and answers, segments, tokens, pairs; and where records come from."""

import gzip
import json

import datasets
import numpy as np
import pytest

from shardline.config.sources import SourceTable
from shardline.data.formats.base import FormatOptions, Ready
from shardline.data.formats.choose import choose_format
from shardline.data.formats.instruction import INSTRUCTIONS
from shardline.data.prepare import prepare
from shardline.data.records import record_source
from shardline.data.token_store import TokenStore
from shardline.data.tokenize_workers import RecordEncoder
from shardline.data.tokenizer import Additions, ByteTokenizer
from shardline.errors import UserError

TOKENIZER = ByteTokenizer(Additions({"eos_token": "<|im_end|>"}, ("<|im_start|>",)))
PREAMBLE = "Below is an instruction that describes a task"


def rows(kind, record, options=None, **table):
    made, _ = choose_format(SourceTable(path="x", type=kind, **table), options or FormatOptions(), TOKENIZER)
    return made.rows(record)


def shown(row):
    """The text of a row, its trained part in brackets."""
    text, inside = "", False
    for token, trained in zip(row.ids.tolist(), row.trained.tolist(), strict=True):
        text += ("[" if trained and not inside else "]" if inside and not trained else "") + TOKENIZER.token_text(token)
        inside = trained
    return text + ("]" if inside else "")


def text(kind, record, **table):
    (row,) = rows(kind, record, **table)
    return shown(row).removeprefix("<begin>")


RECORD = {"instruction": "Add.", "input": "1 2", "output": "3"}


def test_alpaca():
    expected = f"{PREAMBLE}, paired with an input that provides further context. Write a response that appropriately "
    expected += "completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n[3<|im_end|>]"
    assert text("alpaca", RECORD) == expected
    bare = text("alpaca", RECORD | {"input": ""})
    assert bare.startswith(f"{PREAMBLE}. Write a response")
    assert bare.endswith("### Instruction:\nAdd.\n\n### Response:\n[3<|im_end|>]")
    assert text("alpaca:chat", RECORD).endswith("USER: Add.\n1 2\nASSISTANT:[3<|im_end|>]")
    assert text("alpaca_chat.load_qa", {"question": "q", "answer": "a"}).endswith("USER: q\nASSISTANT:[a<|im_end|>]")
    assert text("alpaca", {"q": "Add.", "a": "3"}, field_instruction="q", field_output="a").endswith("[3<|im_end|>]")
    system = RECORD | {"system": "Be exact."}
    assert text("alpaca_w_system.load_instruct", system).startswith("### System:\nBe exact.\n\n### Instruction:\nAdd.")
    with pytest.raises(UserError, match="no field 'system'"):
        rows("alpaca_w_system", RECORD)
    (row,) = rows("alpaca", RECORD, FormatOptions(train_on_inputs=True))
    assert shown(row).startswith("<begin>[Below")


@pytest.mark.parametrize("kind", INSTRUCTIONS)
def test_every_instruction_format_trains_on_the_answer_alone(kind):
    fields = INSTRUCTIONS[kind][1]
    record = {
        fields.instruction: "question",
        fields.input: "given",
        fields.output: "answer",
        fields.system or "-": "system",
    }
    assert text(kind, record).endswith("[answer<|im_end|>]")
    with pytest.raises(UserError, match=f"no field '{fields.output}'"):
        rows(kind, {name: value for name, value in record.items() if name != fields.output})


def test_a_table_describes_a_format_of_ones_own():
    table = {
        "field_instruction": "q",
        "field_output": "a",
        "format": "<{instruction}|{input}|{other}>",
        "no_input_format": "<{instruction}>",
        "system_prompt": "Sys",
        "system_format": "({system})",
    }
    assert text(table, {"q": "{input}", "a": "yes"}) == "(Sys)<{input}>[yes<|im_end|>]"
    assert text(table, {"q": "Q", "input": "I", "a": 7}) == "(Sys)<Q|I|{other}>[7<|im_end|>]"
    with_field = table | {"field_system": "s"}
    assert text(with_field, {"q": "Q", "a": "A", "s": "Mine"}) == "(Mine)<Q>[A<|im_end|>]"
    assert text(with_field, {"q": "Q", "a": "A"}) == "(Sys)<Q>[A<|im_end|>]"


def test_completion_segments_and_tokens():
    assert text("completion", {"text": "abc"}) == "[abc<|im_end|>]"
    assert text("completion", {"body": "abc"}, field="body") == "[abc<|im_end|>]"
    assert rows("completion", {"text": " "}) == []
    parts = [
        {"text": "<|im_start|>ask", "label": False},
        {"text": "tell", "label": True},
        {"text": "x", "label": False},
    ]
    (row,) = rows("input_output", {"segments": parts})
    assert shown(row) == "<|im_start|>ask[tell]x"
    with pytest.raises(UserError, match=r"segments\[0\]: expected text and a label"):
        rows("input_output", {"segments": [{"text": "x"}]})
    (row,) = rows(None, {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8], "attention_mask": [1, 1, 1, 0]})
    assert row.ids.tolist() == [5, 6, 7]
    assert row.trained.tolist() == [False, True, False]
    with pytest.raises(UserError, match="no field 'input_ids', which a source without a type needs"):
        rows(None, {"text": "x"})
    with pytest.raises(UserError, match="input_ids up to 999"):
        rows(None, {"input_ids": [999]})


CHATML = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
ASK = {"role": "user", "content": "Q"}


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        ("chatml.intel", {"question": "Q", "chosen": "good", "rejected": "bad"}),
        ("chatml.icr", {"input": "Q", "chosen": "good", "rejected": "bad"}),
        ("chatml.prompt_pairs", {"prompt": "Q", "chosen": "good", "rejected": "bad"}),
        ("chatml.argilla", {"instruction": "Q", "chosen_response": "good", "rejected_response": "bad"}),
        ("chatml.argilla_chat", {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}),
        ("chatml.ultra", {"prompt": "Q", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}),
        ("chat_template.default", {"messages": [ASK], "chosen": GOOD, "rejected": BAD}),
        ("chat_template.default", {"messages": "Q", "chosen": "good", "rejected": [BAD]}),
        ("chat_template.default", {"prompt": "Q", "chosen": "good", "rejected": "bad"}),
        ("chat_template.argilla", {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}),
    ],
)
def test_pairs_of_conversations(kind, record):
    better, worse = rows(kind, record, FormatOptions(chat_template="chatml"))
    assert shown(better) == CHATML + "[good<|im_end|>]\n"
    assert shown(worse) == CHATML + "[bad<|im_end|>]\n"


def test_pairs_of_texts_and_what_is_missing():
    table = {"field_prompt": "p", "field_chosen": "c", "field_rejected": "r", "prompt_format": "<{prompt}>"}
    better, worse = rows(table, {"p": "Q", "c": "good", "r": "bad"})
    assert (shown(better), shown(worse)) == ("<begin><Q>[good<|im_end|>]", "<begin><Q>[bad<|im_end|>]")
    llama, _ = rows("llama3.intel", {"question": "Q", "chosen": "good", "rejected": "bad", "system": "S"})
    assert "<|start_header_id|>system" in shown(llama)
    with pytest.raises(UserError, match="no field 'rejected' or 'rejected_response'"):
        rows("chatml.intel", {"question": "Q", "chosen": "good"})


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("alpacca", "there is no type 'alpacca', did you mean 'alpaca'"),
        ("alpaca:chta", "no prompt style 'chta', did you mean 'chat'"),
        ("sharegpt.load_role", "message_property_mappings"),
    ],
)
def test_unknown_types_name_the_nearest(kind, message):
    with pytest.raises(UserError, match=message):
        rows(kind, {})


# ---- where records come from -----------------------------------------------------------------------------------------


def texts(**table):
    source = record_source(SourceTable(**({"type": "completion"} | table)))
    return [(where, record["text"]) for chunk in source.chunks() for where, record in chunk.documents()]


@pytest.fixture
def folder(tmp_path):
    records = [{"text": f"t{n}"} for n in range(10)]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "a.jsonl").write_text(lines.replace("\n", "\n\n", 3))
    (tmp_path / "a.json").write_text(json.dumps(records, indent=1))
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(lines)
    data = datasets.Dataset.from_list(records)
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": data, "test": data.select([3])}).save_to_disk(tmp_path / "dict")
    return tmp_path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.parquet", "saved", "dict"])
def test_every_kind_of_file_gives_the_same_records(folder, name):
    path = str(folder / name)
    assert [text for _, text in texts(path=path)] == [f"t{n}" for n in range(10)]
    assert [text for _, text in texts(path=path, split="train[20%:50%]")] == ["t2", "t3", "t4"]
    assert [text for _, text in texts(path=path, split="train[-2:]")] == ["t8", "t9"]
    assert [text for _, text in texts(path=path, shards=3, shards_idx=0)] == ["t0", "t1", "t2", "t3"]
    assert [text for _, text in texts(path=path, shards=3, shards_idx=2)] == ["t7", "t8", "t9"]
    assert [text for _, text in texts(path=path, split="train[:5]", shards=2, shards_idx=1)] == ["t3", "t4"]


def test_places_of_records(folder):
    assert texts(path=str(folder / "a.jsonl"))[2][0] == f"{folder}/a.jsonl:5"
    assert texts(path=str(folder / "a.json"))[2][0] == f"{folder}/a.json:8"
    assert texts(path=str(folder / "a.parquet"))[2][0] == f"{folder}/a.parquet, row 2"
    assert [text for _, text in texts(path=str(folder / "dict"), split="test")] == ["t3"]
    with pytest.raises(UserError, match="no split 'dev'; its splits: train, test"):
        texts(path=str(folder / "dict"), split="dev")
    with pytest.raises(UserError, match="expected a name, or a part of it"):
        texts(path=str(folder / "dict"), split="train[x]")
    with pytest.raises(UserError, match="there is no file or folder"):
        texts(path=str(folder / "nothing.jsonl"))
    assert len(texts(path=str(folder), data_files=["a.json", "a.parquet"])) == 20


def test_a_bad_record_is_named_by_file_and_line(tmp_path):
    file = tmp_path / "chat.jsonl"
    good = json.dumps({"messages": [ASK, GOOD]})
    file.write_text(f"{good}\n{good}\n" + json.dumps({"messages": [{"role": "usr", "content": "x"}]}) + "\n")
    table = SourceTable(path=str(file), type="chat_template")
    made, mark = choose_format(table, FormatOptions(chat_template="chatml"), TOKENIZER)
    with pytest.raises(UserError, match=r"chat.jsonl:3: messages\[0\]: unknown role 'usr', did you mean 'user'"):
        prepare(record_source(table), RecordEncoder(TOKENIZER, made, mark), tmp_path / "out", progress=False)


def test_a_store_of_records_keeps_masks_and_checksums(tmp_path, monkeypatch):
    file = tmp_path / "some.jsonl"
    parts = [[("ab" * (n % 5), False), ("c" * (n % 7 + 1), True)] for n in range(60)]
    file.write_text(
        "".join(json.dumps({"segments": [{"text": t, "label": f} for t, f in part]}) + "\n" for part in parts)
    )
    table = SourceTable(path=str(file), type="input_output")
    made, mark = choose_format(table, FormatOptions(), TOKENIZER)
    monkeypatch.setattr("shardline.data.records.CHUNK_BYTES", 500)
    encoder = RecordEncoder(TOKENIZER, made, mark)
    store = prepare(record_source(table), encoder, tmp_path / "out", progress=False, part_tokens=100, workers=1)
    assert len(store.parts) > 2
    expected = np.concatenate([made.rows(json.loads(line))[0].trained for line in file.read_text().splitlines()])
    assert np.array_equal(store.trained(0, store.tokens), expected)
    for start, count in ((0, 1), (5, 13), (90, 60), (store.tokens - 3, 3)):
        assert np.array_equal(store.trained(start, count), expected[start : start + count])
    assert store.find_damage() == []
    damaged = next((tmp_path / "out").glob("*.trained"))
    damaged.write_bytes(bytes([damaged.read_bytes()[0] ^ 1]) + damaged.read_bytes()[1:])
    assert [problem.file for problem in store.find_damage()] == [str(damaged)]
    with pytest.raises(UserError, match=rf"{damaged} is damaged: bytes 0 to"):
        TokenStore.open(tmp_path / "out").has_trained()
    with pytest.raises(UserError, match="another source or tokenizer"):
        prepare(record_source(table), RecordEncoder(TOKENIZER, made, "other"), tmp_path / "out", progress=False)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('[{"text": "a"}]\n[{"text": "b"}]', r"rows.json:2: text after the end of the list"),
        ('[{"text": "a"},\n{"text": "b"}', r"rows.json: the list has no end"),
        ('[{"text": "a"}]\n{"text": "b"}\n', r"rows.json:2: text after the end"),
    ],
)
def test_a_list_ends_once_and_nothing_follows_it(tmp_path, content, words):
    file = tmp_path / "rows.json"
    file.write_text(content)
    with pytest.raises(UserError, match=words):
        texts(path=str(file))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"input_ids": None}, []),
        ({"input_ids": [1, 2, 3], "attention_mask": None, "labels": None}, [([1, 2, 3], [True] * 3)]),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 1, 0], "labels": [-100, 2, 3]}, [([1, 2], [False, True])]),
    ],
)
def test_columns_without_a_value(record, expected):
    found = Ready(300).rows(record)
    assert [(row.ids.tolist(), row.trained.tolist()) for row in found] == expected


@pytest.mark.parametrize(
    "record", [{"input_ids": ["a"]}, {"input_ids": [1, None]}, {"input_ids": [1], "labels": [None]}]
)
def test_columns_that_are_no_numbers(record):
    with pytest.raises(UserError, match="must be lists of whole numbers"):
        Ready(300).rows(record)
