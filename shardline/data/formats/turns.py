"""Where the turns of a conversation are in its rendered text, and which of its tokens are trained.

A template is a program: nothing says which characters come from which message. There are three ways to find the turn of
an answer, which agree where more than one of them applies:

    marks      {% generation %} ... {% endgeneration %} in the template encloses what the model writes
    prefixes   the messages before a turn, rendered with the header of an answer, are a prefix of the whole text, and
               the turn starts where it ends; rendered with the turn, they end where the turn ends
    a slot     the turn's content is replaced by a word that occurs nowhere else: the texts left and right of that word
               surround the content. This also works where a template rewrites earlier turns

A turn that none of them finds is an error, not a turn that is silently left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np

from shardline.data.formats.template import ChatTemplate, Message, TemplateError
from shardline.data.tokenizer import Pieces, Tokenizer
from shardline.errors import UserError

SLOT = "\ufdd2slot\ufdd3"


class Turn(NamedTuple):
    """The characters [start, end) that one message adds after its header. `marked`: the template marks them."""

    start: int
    end: int
    marked: bool = False


@dataclass(frozen=True)
class Wanted:
    """Which turns are trained, by their number in the conversation, and which of their end tokens."""

    turns: frozenset[int]
    details: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # turn -> characters of its content
    eos: str = "turn"
    eot: str = "turn"


@dataclass(frozen=True)
class EndTokens:
    """Ids of end-of-text and end-of-turn tokens; if `eot` is None, any special token at the end of a turn is one."""

    eos: int | None
    eot: frozenset[int] | None
    special: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, eot_tokens: Sequence[str] | None) -> EndTokens:
        if eot_tokens is None:
            return cls(tokenizer.eos_id, None, tokenizer.special_ids)
        ids = {token: tokenizer.token_id(token) for token in eot_tokens}
        for token, number in ids.items():
            if number is None:
                raise UserError(
                    f"data.eot_tokens: {token!r} is no token of {tokenizer.name!r}; add it with data.added_tokens"
                )
        return cls(tokenizer.eos_id, frozenset(n for n in ids.values() if n is not None), tokenizer.special_ids)

    def is_end(self, token: int) -> bool:
        if token == self.eos:
            return True
        return token in (self.special if self.eot is None else self.eot)


def trained_tokens(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Any,
    wanted: Wanted,
    tokenizer: Tokenizer,
    ends: EndTokens,
) -> tuple[np.ndarray, np.ndarray]:
    """The ids (T,) of a conversation and whether each is trained (T,)."""
    text, generated = template.render(messages, tools)
    pieces = tokenizer.encode_pieces(text)
    trained = np.zeros(len(pieces.ids), dtype=bool)
    finder = _Finder(template, messages, tools, text, generated)
    found_ends: dict[int, None] = {}
    for number in sorted(wanted.turns):
        turn = finder.turn(number)
        inside = np.flatnonzero((pieces.starts < turn.end) & (pieces.ends > turn.start))
        at = _end_token(pieces, text, turn, inside, ends)
        if at is not None:
            found_ends[at] = None
        if number in wanted.details:
            first, _ = finder.content(number)
            for begin, stop in wanted.details[number]:
                trained |= (pieces.starts < first + stop) & (pieces.ends > first + begin)
        elif turn.marked and (at is None or _mode(pieces, at, ends, wanted) in ("turn", "all")):
            trained[inside] = True
        else:
            trained[inside if at is None else inside[inside < at]] = True
        if at is not None and _mode(pieces, at, ends, wanted) == "turn":
            trained[at] = True
    _train_ends(trained, pieces, ends, wanted, [int(pieces.ids[at]) for at in found_ends])
    return pieces.ids, trained


def _mode(pieces: Pieces, at: int, ends: EndTokens, wanted: Wanted) -> str:
    """When the end token at this place is trained."""
    token = int(pieces.ids[at])
    is_turn_end = ends.eot is not None and token in ends.eot
    return wanted.eos if token == ends.eos and not is_turn_end else wanted.eot


def _train_ends(trained: np.ndarray, pieces: Pieces, ends: EndTokens, wanted: Wanted, seen: list[int]) -> None:
    """Mark end tokens that are trained whichever turn they end: `all` of them, or the `last` of the conversation."""
    known = {*seen, *(ends.eot or ()), *([] if ends.eos is None else [ends.eos])}
    places: list[int] = np.flatnonzero(np.isin(pieces.ids, list(known))).tolist()
    modes = {at: _mode(pieces, at, ends, wanted) for at in places}
    last = [at for at in places if modes[at] == "last"][-1:]
    for at in [*last, *(at for at in places if modes[at] == "all")]:
        trained[at] = True


def _end_token(pieces: Pieces, text: str, turn: Turn, inside: np.ndarray, ends: EndTokens) -> int | None:
    """The token that ends a turn: its last one besides white space, or the one that follows the turn."""
    for at in inside[::-1].tolist():
        if ends.is_end(int(pieces.ids[at])):
            return int(at)
        if text[pieces.starts[at] : pieces.ends[at]].strip():
            break
    after = np.flatnonzero(pieces.starts >= turn.end)
    for at in after[:3].tolist():
        if ends.is_end(int(pieces.ids[at])):
            return int(at)
        if text[pieces.starts[at] : pieces.ends[at]].strip():
            break
    return None


class _Finder:
    """Finds the turns of one conversation."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: Any,
        text: str,
        generated: list[tuple[int, int]],
    ) -> None:
        self.template, self.messages, self.tools, self.text = template, list(messages), tools, text
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        self.marked = dict(zip(answers, generated, strict=True)) if len(answers) == len(generated) else {}

    def turn(self, number: int) -> Turn:
        if number in self.marked:
            return Turn(*self.marked[number], marked=True)
        start, end = self._start(number), self._end(number)
        calls = bool(self.messages[number].get("tool_calls"))
        if start is None or end is None or not calls:
            content = self._slot(number)
            if content is None and (start is None or end is None):
                self._refuse(number)
            if content is not None:
                start = content[0] if start is None else min(start, content[0])
                if end is None and calls:
                    self._refuse(number)
                end = content[1] if end is None or not calls else end
        if start is None or end is None or end < start:
            self._refuse(number)
        return Turn(start, end)

    def content(self, number: int) -> tuple[int, int]:
        """The characters of a turn's content."""
        found = self._slot(number)
        if found is None:
            self._refuse(number)
        return found

    def _start(self, number: int) -> int | None:
        """Where the text before an answer, with its header, ends."""
        if self.messages[number]["role"] != "assistant":
            return None
        before, header = self._rendered(number, answer=False), self._rendered(number, answer=True)
        if header is None or header == before or not self.text.startswith(header):
            return None
        return len(header)

    def _end(self, number: int) -> int | None:
        if number == len(self.messages) - 1:
            return len(self.text)
        text = self._rendered(number + 1, answer=False)
        return len(text) if text is not None and self.text.startswith(text) else None

    def _rendered(self, count: int, *, answer: bool) -> str | None:
        """The first `count` messages as text; None where the template refuses them because others are missing."""
        try:
            return self.template.render(self.messages[:count], self.tools, answer=answer).text
        except TemplateError:
            return None

    def _slot(self, number: int) -> tuple[int, int] | None:
        """Where the content is, found by replacing it."""
        replaced = self.messages[number] | {"content": SLOT}
        messages = [*self.messages[:number], replaced, *self.messages[number + 1 :]]
        try:
            left, slot, right = self.template.render(messages, self.tools).text.partition(SLOT)
        except TemplateError:
            return None
        fits = self.text.startswith(left) and self.text.endswith(right) and len(left) + len(right) <= len(self.text)
        return (len(left), len(self.text) - len(right)) if slot and fits and SLOT not in right else None

    def _refuse(self, number: int) -> NoReturn:
        raise UserError(
            f"message {number} ({self.messages[number]['role']}) cannot be found in the text that the chat template"
            f" {self.template.name!r} renders: it leaves the message out or rewrites it. Train on"
            " fewer turns (roles_to_train, message_field_training), or set another chat_template"
        )
