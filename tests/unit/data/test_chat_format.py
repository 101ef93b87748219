"""Conversations as tokens: ids and trained tokens, compared with `transformers`, token by token."""

import re

import pytest

from shardline.config.sources import SourceTable
from shardline.data.formats.base import FormatOptions
from shardline.data.formats.choose import choose_format
from shardline.data.formats.template import choose_template, template_names
from shardline.data.tokenizer import Additions, ByteTokenizer, JsonTokenizer
from shardline.errors import UserError
from tests.unit.data import chat_tokenizers as chats

USER, ANSWER = (
    {"role": "user", "content": "What is  six plus six?\n"},
    {"role": "assistant", "content": "It is twelve."},
)
CONVERSATIONS = {
    "one turn": [USER, ANSWER],
    "two turns": [
        USER,
        ANSWER,
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes,\n\n  I am. é🙂"},
    ],
    "system": [{"role": "system", "content": "You are helpful."}, USER, ANSWER],
    "empty answer": [USER, {"role": "assistant", "content": ""}, {"role": "user", "content": "Hello?"}, ANSWER],
    "answer that repeats the question": [{"role": "user", "content": "Yes"}, {"role": "assistant", "content": "Yes"}],
}


@pytest.fixture(scope="module", params=["bytes", "metaspace"])
def folder(request, tmp_path_factory):
    return chats.write_tokenizer(tmp_path_factory.mktemp("chat") / request.param, request.param)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return chats.write_tokenizer(tmp_path_factory.mktemp("chat") / "level")


def encode(folder, record, options=None, **table):
    tokenizer = JsonTokenizer(folder / "tokenizer.json")
    table = {"path": "x", "type": "chat_template"} | table
    kind, _ = choose_format(SourceTable.model_validate(table), options or FormatOptions(), tokenizer)
    (row,) = kind.rows(record)
    return tokenizer, row


def trained_text(tokenizer, row):
    """The trained tokens, with a bar where an untrained one lies between."""
    texts = [tokenizer.token_text(int(i)) if flag else "\0" for i, flag in zip(row.ids, row.trained, strict=True)]
    return re.sub("\0+", "|", "".join(texts)).strip("|")


def marked(template):
    return re.sub(r"\{%-? (end)?generation -?%\}", "", template)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", template_names())
def test_packaged_templates_give_the_ids_and_the_mask_of_transformers(folder, name, conversation):
    messages = CONVERSATIONS[conversation]
    tokenizer = JsonTokenizer(folder / "tokenizer.json")
    text = choose_template(name, None, tokenizer).text
    # With trimmed places transformers loses an answer that begins with a space: it gets a tokenizer without them.
    untrimmed = chats.write_tokenizer(folder.parent / f"{folder.name}-untrimmed", folder.name, trim=False)
    reference = chats.load_in_transformers(untrimmed, text)
    expected = reference.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    _, row = encode(folder, {"messages": messages}, FormatOptions(chat_template=name))
    assert row.ids.tolist() == expected["input_ids"]
    mask = [bool(flag) for flag in expected["assistant_masks"]]
    if "🙂" in str(messages):  # of a character of several tokens, transformers counts only the first as the last one
        assert all(ours or not theirs for ours, theirs in zip(row.trained.tolist(), mask, strict=True))
    else:
        assert row.trained.tolist() == mask


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", template_names())
def test_turns_are_found_without_marks(folder, name, conversation):
    """The same templates without {% generation %}: prefixes and slots find what the marks enclosed."""
    messages = CONVERSATIONS[conversation]
    text = choose_template(name, None, JsonTokenizer(folder / "tokenizer.json")).text
    _, with_marks = encode(folder, {"messages": messages}, FormatOptions(chat_template=name))
    tokenizer, row = encode(folder, {"messages": messages}, FormatOptions(chat_template_jinja=marked(text)))
    assert row.ids.tolist() == with_marks.ids.tolist()
    spaced = name in (
        "mistral_v1",
        "mistral_v2v3",
    )  # the space before an answer belongs to the mark, not to the content
    same = row.trained.tolist() == with_marks.trained.tolist()
    assert same or (
        spaced and trained_text(tokenizer, with_marks).replace(" ", "") == trained_text(tokenizer, row).replace(" ", "")
    )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (chats.CHATML, "It is twelve.<|im_end|>|Yes,\n\n  I am.<|im_end|>"),
        (chats.HEADERS, "It is twelve.<|eot_id|>|Yes,\n\n  I am.<|eot_id|>"),
        (chats.INST, "It is twelve.</s>|Yes,\n\n  I am.</s>"),
        (chats.THINKING, "It is twelve.<|im_end|>|Yes,\n\n  I am.<|im_end|>"),
    ],
)
def test_templates_like_published_ones(byte_level, template, expected):
    messages = [
        *CONVERSATIONS["system"],
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes,\n\n  I am."},
    ]
    tokenizer, row = encode(byte_level, {"messages": messages}, FormatOptions(chat_template_jinja=template))
    reference = chats.load_in_transformers(byte_level, template).apply_chat_template(messages, return_dict=True)
    assert row.ids.tolist() == reference["input_ids"]
    assert trained_text(tokenizer, row).replace("| ", "|").strip() == expected


TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
CALL = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}],
}
WITH_TOOLS = [USER, CALL, {"role": "tool", "content": "12 degrees"}, {"role": "assistant", "content": "It is cold."}]


@pytest.mark.parametrize("template", [None, chats.THINKING])
def test_tool_calls_are_trained_and_tool_answers_are_not(byte_level, template):
    options = FormatOptions(chat_template="qwen3" if template is None else None, chat_template_jinja=template)
    tokenizer, row = encode(byte_level, {"messages": WITH_TOOLS, "tools": TOOLS}, options)
    text = template or choose_template("qwen3", None, tokenizer).text
    messages = [message | {"content": message.get("content", "")} for message in WITH_TOOLS]
    expected = chats.load_in_transformers(byte_level, text).apply_chat_template(messages, tools=TOOLS, return_dict=True)
    assert row.ids.tolist() == expected["input_ids"]
    trained = trained_text(tokenizer, row)
    assert (
        '{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>|It is cold.<|im_end|>'
        in trained
    )
    assert "degrees" not in trained
    _, same = encode(byte_level, {"messages": WITH_TOOLS, "functions": TOOLS}, options, field_tools="functions")
    assert same.ids.tolist() == row.ids.tolist()


def test_earlier_answers_that_a_template_rewrites_are_trained_as_they_are_written(byte_level):
    messages = [USER, {"role": "assistant", "content": "<think>\nLet me see.\n</think>\n\nTwelve."}, USER, ANSWER]
    tokenizer, row = encode(byte_level, {"messages": messages}, FormatOptions(chat_template_jinja=chats.THINKING))
    assert trained_text(tokenizer, row) == "Twelve.<|im_end|>|It is twelve.<|im_end|>"
    tokenizer, row = encode(byte_level, {"messages": messages[:2]}, FormatOptions(chat_template_jinja=chats.THINKING))
    assert trained_text(tokenizer, row) == "<think>\nLet me see.\n</think>\n\nTwelve.<|im_end|>"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("<think>\nSix, six.\n</think>\n\nTwelve.", "<think>\nSix, six.\n</think>\n\nTwelve.<|im_end|>"),
        ("<reasoning>Six.</reasoning> Twelve.", "<think>\nSix.\n</think>\n\nTwelve.<|im_end|>"),
        (
            "<|begin_of_thought|>Six.<|end_of_thought|>\n<|begin_of_solution|>\nTwelve.\n<|end_of_solution|>",
            "<think>\nSix.\n</think>\n\nTwelve.<|im_end|>",
        ),
        ("<think>Twelve.", "<think>Twelve.<|im_end|>"),
    ],
)
def test_reasoning_in_tags_becomes_a_field_of_its_own(byte_level, content, expected):
    record = {"messages": [USER, {"role": "assistant", "content": content}]}
    options = FormatOptions(chat_template="qwen3")
    tokenizer, row = encode(byte_level, record, options, split_thinking=True)
    assert trained_text(tokenizer, row) == expected
    tokenizer, row = encode(byte_level, record, options)
    assert trained_text(tokenizer, row) == f"{content}<|im_end|>"


def test_reasoning_may_have_another_name_in_the_data_and_in_the_template(byte_level):
    answer = {"role": "assistant", "content": "Twelve.", "thoughts": "Six, six.", "reasoning_content": "Other."}
    qwen3 = FormatOptions(chat_template="qwen3")
    tokenizer, row = encode(byte_level, {"messages": [USER, answer]}, qwen3, field_thinking="thoughts")
    assert trained_text(tokenizer, row) == "<think>\nSix, six.\n</think>\n\nTwelve.<|im_end|>"
    template = "{% for m in messages %}{% if m.why %}({{ m.why }}){% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    own = FormatOptions(chat_template_jinja=template)
    tokenizer, row = encode(byte_level, {"messages": [USER, answer]}, own, template_thinking_key="why")
    assert "(Other.)Twelve." in "".join(tokenizer.token_text(int(one)) for one in row.ids)


def test_names_that_templates_get(byte_level, tmp_path):
    template = "{% for m in messages %}{{ m.content }}{% if mood %}, {{ mood }}{% endif %}<|im_end|>{% endfor %}"
    record, options = {"messages": [USER, ANSWER]}, FormatOptions(chat_template_jinja=template)
    tokenizer, plain = encode(byte_level, record, options)
    assert trained_text(tokenizer, plain) == "It is twelve.<|im_end|>"
    merry = FormatOptions(chat_template_jinja=template, chat_template_kwargs={"mood": "merry"})
    tokenizer, row = encode(byte_level, record, merry)
    assert "twelve., merry" in "".join(tokenizer.token_text(int(one)) for one in row.ids)
    table = SourceTable(path="x", type="chat_template")
    assert options.fingerprint(table, template) != merry.fingerprint(table, template)
    heavy = table.model_copy(update={"weight": 2.0})  # changes which rows are read, not their tokens
    assert options.fingerprint(heavy, template) == options.fingerprint(table, template)


def test_a_turn_that_the_template_leaves_out_is_refused(byte_level):
    options = FormatOptions(chat_template_jinja=chats.FORGETFUL)
    with pytest.raises(UserError, match=r"message 1 \(assistant\) cannot be found"):
        encode(byte_level, {"messages": CONVERSATIONS["two turns"]}, options)


@pytest.mark.parametrize(
    ("eos", "expected"),
    [
        ("turn", "It is twelve.<|im_end|>|It is twelve.<|im_end|>"),
        ("all", "<|im_end|>|It is twelve.<|im_end|>|<|im_end|>|It is twelve.<|im_end|>"),
        ("last", "It is twelve.|It is twelve.<|im_end|>"),
        ("none", "It is twelve.|It is twelve."),
    ],
)
@pytest.mark.parametrize("template", ["chatml", None])
def test_which_end_tokens_are_trained(byte_level, eos, expected, template):
    options = FormatOptions(chat_template=template, chat_template_jinja=None if template else chats.CHATML)
    tokenizer, row = encode(byte_level, {"messages": [USER, ANSWER] * 2}, options, train_on_eos=eos)
    assert trained_text(tokenizer, row) == expected


def test_end_tokens_of_turns_by_name(byte_level):
    options = FormatOptions(chat_template_jinja=chats.CHATML, eot_tokens=("<|eot_id|>",))
    tokenizer, row = encode(byte_level, {"messages": [USER, ANSWER]}, options)
    assert trained_text(tokenizer, row) == "It is twelve."  # <|im_end|> is not named
    options = FormatOptions(chat_template_jinja=chats.CHATML, eot_tokens=("<|im_end|>",))
    _, row = encode(byte_level, {"messages": [USER, ANSWER]}, options, train_on_eos="none", train_on_eot="turn")
    assert trained_text(tokenizer, row) == "It is twelve.<|im_end|>"
    with pytest.raises(UserError, match=r"'<\|nope\|>' is no token"):
        encode(
            byte_level, {"messages": [USER, ANSWER]}, FormatOptions(chat_template="chatml", eot_tokens=("<|nope|>",))
        )


def test_roles_to_train_and_turns_that_say_so_themselves(byte_level):
    options = FormatOptions(chat_template="chatml")
    messages = [USER, ANSWER, {"role": "user", "content": "Sure?"}, ANSWER]
    tokenizer, row = encode(byte_level, {"messages": messages}, options, roles_to_train=["user"])
    assert trained_text(tokenizer, row) == "What is  six plus six?\n<|im_end|>|Sure?<|im_end|>"
    _, named = encode(byte_level, {"messages": messages}, options, roles_to_train=["human"])  # as the data may say
    assert trained_text(tokenizer, named) == trained_text(tokenizer, row)
    marked_turns = [USER, ANSWER | {"train": False}, {"role": "user", "content": "Sure?", "train": True}, ANSWER]
    _, row = encode(byte_level, {"messages": marked_turns}, options, message_field_training="train")
    assert trained_text(tokenizer, row) == "Sure?<|im_end|>|It is twelve.<|im_end|>"
    details = [USER, ANSWER | {"parts": [{"begin_offset": 6, "end_offset": 12, "train": True}]}]
    _, row = encode(
        byte_level, {"messages": details}, options, message_field_training_detail="parts", train_on_eos="none"
    )
    assert trained_text(tokenizer, row).strip() == "twelve."
    details[1]["parts"].append({"begin_offset": 0, "end_offset": 1, "train": False})
    _, row = encode(
        byte_level, {"messages": details}, options, message_field_training_detail="parts", train_on_eos="none"
    )
    assert trained_text(tokenizer, row).strip() == "twelve."
    details = [USER, ANSWER | {"parts": []}, {"role": "user", "content": "Sure?"}, ANSWER | {"parts": None}]
    _, row = encode(byte_level, {"messages": details}, options, message_field_training_detail="parts")
    assert trained_text(tokenizer, row) == "It is twelve.<|im_end|>", "no part of the first answer, all of the second"
    _, row = encode(byte_level, {"messages": messages}, FormatOptions(chat_template="chatml", train_on_inputs=True))
    assert "six" in trained_text(tokenizer, row)
    assert "<|im_start|>" not in trained_text(tokenizer, row)


def test_the_older_shape_of_records_by_mappings(byte_level):
    record = {
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello there"}],
        "system": "Be kind.",
    }
    mapping = {"role": "from", "content": "value"}
    options = FormatOptions(chat_template="chatml", default_system_message="unused")
    tokenizer, row = encode(
        byte_level, record, options, field_messages="conversations", message_property_mappings=mapping
    )
    same = {
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello there"},
        ]
    }
    _, expected = encode(byte_level, same, options)
    assert row.ids.tolist() == expected.ids.tolist()
    assert trained_text(tokenizer, row) == "Hello there<|im_end|>"
    older = {"messages": record["conversations"], "system": "Be kind."}
    _, row = encode(byte_level, older, options, message_field_role="from", message_field_content="value")
    assert row.ids.tolist() == expected.ids.tolist()
    _, row = encode(byte_level, same, options, drop_system_message=True)
    assert "kind" not in tokenizer.decode(row.ids.tolist())
    _, row = encode(byte_level, {"messages": [USER, ANSWER]}, options)
    assert "unused" in tokenizer.decode(row.ids.tolist())
    _, row = encode(byte_level, same, options, roles={"assistant": ["gpt"], "user": ["human"]})
    assert row.ids.tolist() == expected.ids.tolist(), "roles without a mapping keep their names"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x"}, "no field 'messages'; its fields: text"),
        ({"messages": "x"}, "field 'messages' holds str, expected a list of messages"),
        ({"messages": []}, "holds no message"),
        (
            {"messages": [{"role": "asistant", "content": "x"}]},
            r"messages\[0\]: unknown role 'asistant', did you mean 'assistant'",
        ),
        ({"messages": [{"content": "x"}]}, r"messages\[0\]: no field 'role' with the role; its fields: content"),
        ({"messages": [{"role": "user", "text": "x"}]}, r"messages\[0\]: no field 'content' with the content"),
    ],
)
def test_errors_say_what_was_expected(byte_level, record, message):
    with pytest.raises(UserError, match=message):
        encode(byte_level, record, FormatOptions(chat_template="chatml"))


def test_what_a_template_says_is_reported(byte_level):
    with pytest.raises(UserError, match="roles must alternate"):
        encode(byte_level, {"messages": [ANSWER]}, FormatOptions(chat_template_jinja=chats.INST))
    with pytest.raises(UserError, match="line 1"):
        encode(byte_level, {"messages": [USER]}, FormatOptions(chat_template_jinja="{% for x in %}"))


def test_where_a_template_comes_from(byte_level, tmp_path):
    bare = JsonTokenizer(byte_level / "tokenizer.json")
    with pytest.raises(UserError, match="has no chat template: set chat_template"):
        choose_template(None, None, bare)
    assert choose_template("tokenizer_default_fallback_chatml", None, bare).name == "chatml"
    with pytest.raises(UserError, match="did you mean 'chatml'"):
        choose_template("chatlm", None, bare)
    own = JsonTokenizer(chats.write_tokenizer(tmp_path / "own", template=chats.CHATML) / "tokenizer.json")
    for name in (None, "tokenizer_default", "tokenizer_default_fallback_llama3"):
        assert choose_template(name, None, own).text == chats.CHATML
    file = tmp_path / "mine.jinja"
    file.write_text(chats.HEADERS)
    assert choose_template("jinja", str(file), own).text == chats.HEADERS
    (tmp_path / "own" / "chat_template.jinja").write_text(chats.INST)
    assert JsonTokenizer(tmp_path / "own" / "tokenizer.json").chat_template == chats.INST


def test_added_tokens_of_the_byte_tokenizer_are_one_token_each():
    tokenizer = ByteTokenizer(Additions({"eos_token": "<|im_end|>"}, ("<|im_start|>",)))
    pieces = tokenizer.encode_pieces("<|im_start|>é<|im_end|>")
    assert pieces.ids.tolist() == [259, 0xC3, 0xA9, 258]
    assert pieces.starts.tolist() == [0, 12, 12, 13]
    assert tokenizer.eos_id == 258
