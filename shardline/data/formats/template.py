"""Chat templates: Jinja text of a tokenizer, a packaged name or a file, rendered as `transformers` does."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shardline.data.tokenizer import Tokenizer
from shardline.errors import UserError
from shardline.registry import nearest

FOLDER = Path(__file__).parent / "templates"
ALIASES = {
    "mistral": "mistral_v7_tekken",
    "gemma2": "gemma",
    "gemma3": "gemma",
    "gemma3n": "gemma",
    "phi_35": "phi_3",
    "llama3_2_vision": "llama3",
    "falcon_h1": "chatml",
    "qwen2_vl": "qwen_25",
    "command_a": "cohere",
    "aya": "cohere",
}
FROM_TOKENIZER, FALLBACK = "tokenizer_default", "tokenizer_default_fallback_"
MOST_SECONDS, MOST_LETTERS = 3.0, 2**24  # of one conversation
OPEN, CLOSE = "\ufdd0", "\ufdd1"  # around what {% generation %} encloses; Unicode has no characters there

Message = dict[str, Any]


class Rendered(NamedTuple):
    """A conversation as text, and the (first, last + 1) characters that the template marks as generated."""

    text: str
    generated: list[tuple[int, int]]


class TemplateError(UserError):
    """A template's error about a conversation that it cannot render."""


@dataclass(frozen=True)
class ChatTemplate:
    """The text of a template, and the special tokens that it may name."""

    name: str
    text: str
    special_tokens: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, Any], ...] = ()  # further names that the template may read

    def render(self, messages: Sequence[Message], tools: Any = None, *, answer: bool = False) -> Rendered:
        """The conversation as text; `answer` adds what comes before the next answer."""
        import jinja2

        try:
            names = dict(self.special_tokens) | dict(self.options)
            names |= {"messages": list(messages), "tools": tools, "add_generation_prompt": answer}
            with _time_limit(MOST_SECONDS):
                text = _compiled(self.text).render(**names)
            if len(text) > MOST_LETTERS:
                raise ValueError(f"it writes {len(text):,} characters for one conversation")
        except MemoryError as error:
            raise TemplateError(f"the chat template {self.name!r} takes more memory than it may have") from error
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template {self.name!r}, line {error.lineno}: {error.message}") from error
        except Exception as error:  # a template can raise anything
            reason = (str(error) or type(error).__name__)[:500]
            raise TemplateError(f"the chat template {self.name!r}: {reason}") from error
        return _without_marks(text)


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after this much CPU time; without effect outside the main thread, which alone has signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} s for one conversation")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def template_names() -> list[str]:
    return sorted([*(file.stem for file in FOLDER.glob("*.jinja")), *ALIASES])


def choose_template(
    name: str | None, jinja: str | None, tokenizer: Tokenizer, options: Mapping[str, Any] | None = None
) -> ChatTemplate:
    """The template of `chat_template` and `chat_template_jinja`, or the tokenizer's where neither is set."""
    special = tuple(sorted(tokenizer.special_tokens.items())), tuple((options or {}).items())
    if name == "jinja" or (name is None and jinja):
        if not jinja:
            raise UserError("chat_template = 'jinja' needs chat_template_jinja, the text of a template or its file")
        return ChatTemplate(*_text_or_file(jinja), *special)
    name = name or FROM_TOKENIZER
    if name.startswith(FALLBACK) or name == FROM_TOKENIZER:
        if tokenizer.chat_template is not None:
            return ChatTemplate(f"of {tokenizer.name}", tokenizer.chat_template, *special)
        if name == FROM_TOKENIZER:
            raise UserError(
                f"the tokenizer {tokenizer.name!r} has no chat template: set chat_template (--data.chat_template) to"
                f" one of {', '.join(template_names())}, or to 'jinja' with chat_template_jinja"
            )
        name = name.removeprefix(FALLBACK)
    if name not in template_names():
        raise UserError(
            f"there is no chat template {name!r}{nearest(name, template_names())}; templates: "
            f"{', '.join(template_names())}, {FROM_TOKENIZER}, {FALLBACK}NAME, jinja"
        )
    return ChatTemplate(name, (FOLDER / f"{ALIASES.get(name, name)}.jinja").read_text(encoding="utf-8"), *special)


def without_generation(text: str) -> str:
    """A template without {% generation %}, which not every program knows."""
    return re.sub(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}", r"{#\1 \2#}", text)


def _text_or_file(jinja: str) -> tuple[str, str]:
    if "{" in jinja or "\n" in jinja:
        return "chat_template_jinja", jinja
    try:
        return jinja, Path(jinja).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"chat_template_jinja = {jinja!r} cannot be read: {error}") from error


def _without_marks(text: str) -> Rendered:
    """Take the marks out of a rendered text, and note where they were."""
    generated, pieces, length = [], [], 0
    for number, piece in enumerate(text.split(OPEN)):
        inside, closed, after = piece.partition(CLOSE) if number else ("", "", piece)
        if closed:
            generated.append((length, length + len(inside)))
        pieces += [inside, after]
        length += len(inside) + len(after)
    return Rendered("".join(pieces), generated)


@functools.cache
def _compiled(text: str) -> Any:
    """The template, compiled with the filters and functions that `transformers` gives to templates."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError as JinjaError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}...{% endgeneration %}`: the part of a message that the model writes."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{OPEN}{caller()}{CLOSE}"

    def refuse(message: str) -> None:
        raise JinjaError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **rest: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **rest)

    class BoundedTemplates(ImmutableSandboxedEnvironment):
        """A sandbox that refuses huge powers: they would take minutes, which no signal can interrupt."""

        intercepted_binops = frozenset({"**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if isinstance(left, int) and isinstance(right, int) and abs(right) * left.bit_length() > 10_000:
                raise JinjaError(f"{left} {operator} {right} is too large")
            return super().call_binop(context, operator, left, right)

    environment = BoundedTemplates(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(text)
