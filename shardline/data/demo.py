"""The demo's corpus: short stories, sums and lists made by a seeded grammar, so that training needs no file."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from shardline.data.token_store import TokenStore, join_documents
from shardline.data.tokenizer import ByteTokenizer, Tokenizer

Choice = TypeVar("Choice")
# Characters and the seed of each part of the corpus.
CHARACTERS = {"training": 3_000_000, "validation": 120_000}
SEEDS = {"training": 1, "validation": 2}


def _words(text: str, separator: str = " ") -> list[str]:
    return text.split(separator)


NAMES = _words("Ada Ben Cleo Dario Edda Finn Greta Hugo Ines Jonas Kira Leo Mina Nora Oskar Pia Rosa Tim Uma Viktor")
ANIMALS = _words("cat dog fox wolf hen mouse horse goat bear duck frog crow")
THINGS = _words("lamp boat key map drum kite coin cup rope bell book shell stone ladder basket mirror")
COLORS = _words("red blue green yellow white black brown grey golden silver")
SIZES = _words("small big tiny worn new heavy light round long")
PLACES = _words("garden kitchen forest harbour market tower cellar meadow school mill bridge library")
FRUITS = _words("apples pears plums cherries lemons nuts figs grapes beans carrots")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
FOUND = _words("found lost painted carried sold repaired dropped cleaned borrowed hid")
WENT = _words("walked ran went came hurried drove")
FEELINGS = _words("happy tired hungry proud curious calm sad surprised")
WEATHER = _words("it rained|the sun was out|the wind was strong|snow fell|it was foggy|the night was clear", "|")
ENDS = _words("Then everyone went home.|That was the end of the day.|And so they became friends.", "|")
NUMBERS = _words("zero one two three four five six seven eight nine ten eleven twelve")
OPPOSITES = {"big": "small", "old": "new", "heavy": "light", "long": "short", "warm": "cold", "loud": "quiet"}


@functools.cache
def documents(section: str) -> tuple[str, ...]:
    """The documents of "training" or "validation"; the two draw from different seeds."""
    chance = random.Random(SEEDS[section])
    result: list[str] = []
    missing = CHARACTERS[section]
    while missing > 0:
        result.append(_pick(chance, WRITERS)(chance))
        missing -= len(result[-1])
    return tuple(result)


def demo_store(section: str, tokenizer: Tokenizer) -> TokenStore:
    """The demo's documents as a store in memory."""
    texts = documents(section)
    if isinstance(tokenizer, ByteTokenizer):
        arrays = tokenizer.encode_arrays(texts)
    else:  # one by one: the library's threads would deadlock in worker processes that are forked later
        arrays = [np.array(tokenizer.encode(text), dtype=np.uint32) for text in texts]
    return TokenStore.from_arrays(*join_documents(arrays, tokenizer), f"demo {section} 1", tokenizer)


def conversations(count: int = 2000) -> list[dict[str, Any]]:
    """Short conversations for the demos of chats and of pairs: questions that have one answer."""
    chance, other = random.Random(3), random.Random(4)
    return [_conversation(chance) | _pair(other) for _ in range(count)]


def _conversation(chance: random.Random) -> dict[str, Any]:
    messages = [{"role": "system", "content": "You answer in one line."}] if chance.random() < 0.3 else []
    for _ in range(1 + int(chance.random() * 3)):
        question, answer = _pick(chance, ASKERS)(chance)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def _pair(chance: random.Random) -> dict[str, Any]:
    """A question with its answer, and the same answer after idle words."""
    question, answer = _pick(chance, ASKERS)(chance)
    return {"prompt": question, "chosen": answer, "rejected": f"{_pick(chance, IDLE)} {answer}"}


def _ask_day(chance: random.Random) -> tuple[str, str]:
    day = int(chance.random() * 7)
    return f"What comes after {DAYS[day]}?", f"{DAYS[(day + 1) % 7]}."


def _ask_opposite(chance: random.Random) -> tuple[str, str]:
    word = _pick(chance, list(OPPOSITES))
    return f"What is the opposite of {word}?", f"The opposite of {word} is {OPPOSITES[word]}."


def _ask_spelling(chance: random.Random) -> tuple[str, str]:
    word = _pick(chance, THINGS)
    return f"How do you spell {word}?", f"{'-'.join(word)}."


def _ask_sum(chance: random.Random) -> tuple[str, str]:
    a, b = int(chance.random() * 6), int(chance.random() * 6)
    return f"What is {a} + {b}?", f"{a} + {b} = {a + b}."


IDLE = ["Well, let me think.", "That is a good question!", "As everybody knows:", "Honestly, I would say this."]
ASKERS: list[Callable[[random.Random], tuple[str, str]]] = [_ask_day, _ask_opposite, _ask_spelling, _ask_sum]


def _pick(chance: random.Random, choices: list[Choice]) -> Choice:
    return choices[int(chance.random() * len(choices))]  # three times faster than random.choice


def _sentence(chance: random.Random, name: str, animal: str) -> str:
    kind = int(chance.random() * 6)
    thing = f"{_pick(chance, SIZES)} {_pick(chance, COLORS)} {_pick(chance, THINGS)}"
    place = _pick(chance, PLACES)
    if kind == 0:
        return f"On {_pick(chance, DAYS)} {name} {_pick(chance, FOUND)} a {thing} in the {place}."
    if kind == 1:
        return f"The {animal} {_pick(chance, WENT)} to the {place} because {_pick(chance, WEATHER)}."
    if kind == 2:
        return f'"Where is my {thing}?" asked {name}. "It is in the {place}," said the {animal}.'
    if kind == 3:
        return f"{name} was {_pick(chance, FEELINGS)} and gave the {thing} to {_pick(chance, NAMES)}."
    if kind == 4:
        return f"When {_pick(chance, WEATHER)}, the {animal} slept in the {place}."
    return f"{name} and the {animal} {_pick(chance, WENT)} from the {place} to the {_pick(chance, PLACES)}."


def _story(chance: random.Random) -> str:
    name, animal = _pick(chance, NAMES), _pick(chance, ANIMALS)
    first = f"Once there was a {animal} that lived with {name} near the {_pick(chance, PLACES)}."
    middle = [_sentence(chance, name, animal) for _ in range(2 + int(chance.random() * 5))]
    return " ".join([first, *middle, _pick(chance, ENDS)]) + "\n"


def _sums(chance: random.Random) -> str:
    lines = []
    for _ in range(3 + int(chance.random() * 6)):
        a, b = int(chance.random() * 13), int(chance.random() * 13)
        kind = int(chance.random() * 3)
        if kind == 0:
            lines.append(f"{a} + {b} = {a + b}")
        elif kind == 1:
            lines.append(f"{a + b} - {b} = {a}")
        else:
            lines.append(f"{a} times {b} is {a * b}")
    return "\n".join(lines) + "\n"


def _shopping(chance: random.Random) -> str:
    lines = [f"{_pick(chance, NAMES)} buys on {_pick(chance, DAYS)}:"]
    total = 0
    for _ in range(2 + int(chance.random() * 4)):
        count = 2 + int(chance.random() * 11)
        total += count
        lines.append(f"- {NUMBERS[count]} {_pick(chance, FRUITS)}")
    return "\n".join([*lines, f"{total} pieces in all."]) + "\n"


def _questions(chance: random.Random) -> str:
    lines = []
    for _ in range(2 + int(chance.random() * 4)):
        kind = int(chance.random() * 3)
        if kind == 0:
            day = int(chance.random() * 7)
            lines.append(f"What comes after {DAYS[day]}? {DAYS[(day + 1) % 7]}.")
        elif kind == 1:
            word = _pick(chance, list(OPPOSITES))
            lines.append(f"What is the opposite of {word}? {OPPOSITES[word]}.")
        else:
            word = _pick(chance, THINGS)
            lines.append(f"How do you spell {word}? {'-'.join(word)}.")
    return "\n".join(lines) + "\n"


def _counting(chance: random.Random) -> str:
    start, step = int(chance.random() * 20), 1 + int(chance.random() * 5)
    row = ", ".join(str(start + step * i) for i in range(6 + int(chance.random() * 8)))
    return f"Counting by {step} from {start}: {row}.\n"


WRITERS: list[Callable[[random.Random], str]] = [_story, _story, _story, _sums, _shopping, _questions, _counting]
