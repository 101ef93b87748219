"""How messages write lists, plurals, ranges and sizes."""

import pytest

from shardline.words import counted, listed, numbered, ranges, sized


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
