"""How messages write lists, plurals, ranges, sizes and tables, and what of a line gives way where it is narrow."""

import io
import shlex

import pytest

from shardline.words import (
    Part,
    ShellCommand,
    counted,
    fitted,
    flowing,
    for_stream,
    listed,
    numbered,
    ranges,
    roughly,
    sized,
    table_lines,
    to_stderr,
    wrapped,
)


def test_a_list_is_shortened_and_says_by_how_much():
    assert listed([]) == ""
    assert listed(list("abc"), most=3) == "a, b, c"
    assert listed(list("abcde"), most=3) == "a, b, c and 2 more"
    assert listed(["one", "two", "three"], most=2, between="\n") == "one\ntwo and 1 more"


def test_a_noun_agrees_with_its_number():
    assert [counted(n, "rank") for n in (0, 1, 2, 12345)] == ["0 ranks", "1 rank", "2 ranks", "12,345 ranks"]
    assert numbered("rank", [3]) == "rank 3"
    assert numbered("rank", {8, 0, 1, 2}) == "ranks 0-2, 8"


def test_runs_of_numbers_are_ranges():
    assert ranges([]) == ""
    assert ranges([5, 3, 4, 7, 9, 10]) == "3-5, 7, 9-10"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.00 KiB"), (3 << 29, "1.50 GiB"), (1 << 41, "2.00 TiB")],
)
def test_a_size_has_the_largest_unit_it_fills(size, text):
    assert sized(size) == text


@pytest.mark.parametrize(
    ("size", "text"), [(12, "12 bytes"), (3 << 29, "1.5 GiB"), (1000 << 20, "1000 MiB"), (12345678, "11.8 MiB")]
)
def test_an_estimate_has_three_digits(size, text):
    assert roughly(size) == text


def test_a_table_is_broken_between_words_where_a_width_is_given():
    rows = [("one", "a value"), ("label", "a value of several words")]
    assert ["".join(line) for line in table_lines(rows)] == ["one    a value", "label  a value of several words"]
    assert ["".join(line) for line in table_lines(rows, 18)] == [
        "one    a value",
        "label  a value of",
        "       several",
        "       words",
    ]


@pytest.mark.parametrize("width", range(30, 80, 7))
def test_a_broken_command_is_the_same_to_a_shell(width):
    command = ShellCommand("shardline generate 'a folder' --prompt \"Once upon a time\" --max-new-tokens=20 --json")
    lines = [rest for _, rest in table_lines([("go", command)], width)]
    assert all(line.endswith(" \\") for line in lines[:-1])
    assert shlex.split(" ".join(line.removesuffix("\\") for line in lines)) == shlex.split(command)
    assert all(len(line) <= width - 4 for line in lines if len(line.split()) > 2)


def test_the_least_important_parts_give_way():
    parts = [Part("first"), Part("second", 2), Part("third", 1)]
    assert fitted(parts, 20) == "first  second  third"
    assert fitted(parts, 19) == "first  third"
    assert fitted(parts, 3) == "first"


def test_only_a_terminal_gets_broken_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "10")
    stream, text = io.StringIO(), "one two three\n  four"
    assert for_stream(text, stream) == text
    stream.isatty = lambda: True
    assert for_stream(text, stream) == wrapped(text, 10) == "one two\nthree\n  four"
    assert wrapped("averylongword in it", 10) == "averylongword\nin it"


def test_messages_are_wrapped_on_a_terminal_alone(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "10")
    to_stderr("note: one two")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    to_stderr("note: one two")
    assert capsys.readouterr().err == "note: one two\nnote: one\ntwo\n"


def test_lines_of_a_source_flow_on_inside_a_sentence():
    assert flowing("one,\ntwo.\nThree:\nfour\n\nfive") == "one, two.\nThree:\nfour\n\nfive"
