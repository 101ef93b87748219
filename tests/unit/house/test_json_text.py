"""JSON of others: a value, or a ValueError."""

import pytest

from shardline.json_text import DEEPEST, parse_json, parse_one


def nested(depth):
    return "[" * depth + "]" * depth


def test_what_nests_deeply_is_a_value_error_whatever_the_version_of_python():
    assert parse_json(nested(DEEPEST)) is not None
    assert parse_json('{"a": ' * (DEEPEST - 1) + "[1]" + "}" * (DEEPEST - 1)) is not None
    assert parse_json("[" + ", ".join(["[]"] * 1000) + "]") == [[]] * 1000
    assert parse_json('"' + "[" * 1000 + '"') == "[" * 1000
    for depth in (DEEPEST + 1, 3000, 200_000):
        with pytest.raises(ValueError, match="nested more than 100 deep"):
            parse_json(nested(depth))
        with pytest.raises(ValueError, match="nested more than 100 deep"):
            parse_one("x" + nested(depth), 1)


@pytest.mark.parametrize("text", [b"\xff\xfe", "", "[1", "1" * 5000, b"{'a': 1}"])
def test_other_errors_are_value_errors_too(text):
    with pytest.raises(ValueError, match=r".+"):
        parse_json(text)


def test_one_of_several_values():
    assert parse_one('[1] {"a": 2}', 4) == ({"a": 2}, 12)
