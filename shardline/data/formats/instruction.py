"""Formats with a prompt and an answer: `alpaca` and its siblings, and those of a `type` that is a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardline.config.sources import PromptTable, SourceTable
from shardline.data.formats.base import Record, Tokens, join_segments, text_of
from shardline.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Style:
    """The prompt's texts with and without an input, the text around a system prompt, and default system prompts."""

    turn: str
    no_input: str
    system_format: str = "{system}"
    system: str = ""
    system_no_input: str = ""


@dataclass(frozen=True)
class Fields:
    """Names of a record's fields."""

    instruction: str = "instruction"
    input: str = "input"
    output: str = "output"
    system: str | None = None


_TASK = "Below is an instruction that describes a task"
_WITH_INPUT = f"{_TASK}, paired with an input that provides further context. "
_ANSWER = "Write a response that appropriately completes the request.\n\n"
_INSTRUCT = (
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
    "### Instruction:\n{instruction}\n\n### Response:\n",
)
_ORCAMINI = "### User:\n{instruction}\n\n### Response:\n"
_CHAT = ("USER: {instruction}\n{input}\nASSISTANT:", "USER: {instruction}\nASSISTANT:")
_CHATML = (
    "<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
)
_PHI = ("<|user|>\n{instruction}<|end|>{input}<|assistant|>", "<|user|>\n{instruction}<|end|><|assistant|>")
_SYSTEMS = (_WITH_INPUT + _ANSWER, f"{_TASK}. {_ANSWER}")
STYLES = {
    "instruct": Style(*_INSTRUCT, "{system}", *_SYSTEMS),
    "chat": Style(*_CHAT, "{system}", *_SYSTEMS),
    "chatml": Style(*_CHATML, "<|im_start|>system\n{system}<|im_end|>\n", *_SYSTEMS),
    "phi": Style(*_PHI, "<|system|>\n{system}<|end|>\n", *_SYSTEMS),
}
_ORCA = Fields("question", "input", "response", "system_prompt")
# Name of a type -> its prompt style and the fields of its records. `alpaca:chat` chooses another style.
INSTRUCTIONS: dict[str, tuple[Style, Fields]] = {
    "alpaca": (STYLES["instruct"], Fields()),
    "alpaca_instruct": (Style(*_INSTRUCT), Fields()),
    "alpaca_chat": (STYLES["chat"], Fields()),
    "alpaca_chat.load_qa": (STYLES["chat"], Fields("question", "input", "answer")),
    "alpaca_chat.load_camel_ai": (STYLES["chat"], Fields("message_1", "input", "message_2")),
    "alpaca_w_system": (Style(*_CHAT, "SYSTEM: {system}\n"), Fields(system="system")),
    "alpaca_w_system.load_instruct": (Style(*_INSTRUCT, "### System:\n{system}\n\n"), Fields(system="system")),
    "alpaca_w_system.load_chat": (Style(*_CHAT, "SYSTEM: {system}\n"), Fields(system="system")),
    "alpaca_w_system.load_open_orca": (
        Style(
            "### Human:\n{instruction}\n### Additional Context:\n{input}\n### Assistant:\n",
            "### Human:\n{instruction}\n### Assistant:\n",
            "### System:\n{system}\n",
        ),
        _ORCA,
    ),
    "alpaca_w_system.load_open_orca_chatml": (Style(*_CHATML, STYLES["chatml"].system_format), _ORCA),
    "gpteacher": (STYLES["instruct"], Fields(output="response")),
    "oasst": (STYLES["instruct"], Fields("INSTRUCTION", "input", "RESPONSE")),
    "jeopardy": (
        Style(_INSTRUCT[0], _INSTRUCT[1], "{system}", "Below is a Jeopardy clue and its category. Answer it.\n\n"),
        Fields("question", "category", "answer"),
    ),
    "summarizetldr": (
        Style("{instruction}", "USER: Summarize the following article as a TL;DR.\n{instruction}\nASSISTANT:"),
        Fields("article", "input", "summary"),
    ),
    "context_qa": (
        Style("USER: {instruction}\n{input}\nASSISTANT:", _CHAT[1]),
        Fields("question", "context", "answer"),
    ),
    "orcamini": (
        Style(_ORCAMINI, _ORCAMINI, "### System:\n{system}\n\n"),
        Fields(system="system"),
    ),
    "metharme": (Style("{instruction}", "{instruction}"), Fields("prompt", "input", "generation")),
}


@dataclass(frozen=True)
class Instruction:
    """A prompt made of fields, and an answer that is trained with its end token."""

    tokenizer: Tokenizer
    style: Style
    fields: Fields
    train_on_inputs: bool = False
    needs_system: bool = False
    pairs: bool = field(default=False, init=False)
    splits: bool = field(default=False, init=False)

    def rows(self, record: Record) -> list[Tokens]:
        names = self.fields
        instruction = text_of(record, names.instruction)
        given = text_of(record, names.input, needed=False)
        answer = text_of(record, names.output)
        system = self.style.system if given else self.style.system_no_input
        if names.system is not None:
            system = text_of(record, names.system, needed=self.needs_system) or system
        turn = self.style.turn if given else self.style.no_input
        prompt = self.style.system_format.replace("{system}", system) if system else ""
        prompt += _filled(turn, {"instruction": instruction, "input": given})
        return [join_segments([(prompt, self.train_on_inputs), (answer, True)], self.tokenizer)]


def _filled(template: str, values: Mapping[str, str]) -> str:
    """The template with {name} replaced; texts that hold braces themselves stay as they are."""
    parts, at = [], 0
    while (opened := template.find("{", at)) >= 0:
        closed = template.find("}", opened)
        name = template[opened + 1 : closed] if closed > opened else ""
        if name in values:
            parts += [template[at:opened], values[name]]
            at = closed + 1
        else:
            parts.append(template[at : opened + 1])
            at = opened + 1
    return "".join([*parts, template[at:]])


def custom_instruction(prompt: PromptTable, tokenizer: Tokenizer, train_on_inputs: bool) -> Instruction:
    """The format of a `type` that is a table."""
    turn = prompt.format if prompt.format is not None else "{instruction} {input}"
    no_input = prompt.no_input_format
    if no_input is None:
        no_input = turn if prompt.format is not None else "{instruction}"
    system = prompt.system_prompt or ""
    style = Style(turn, no_input, prompt.system_format or "{system}", system, system)
    fields = Fields(
        prompt.field_instruction or "instruction",
        prompt.field_input or "input",
        prompt.field_output or "output",
        prompt.field_system,
    )
    return Instruction(tokenizer, style, fields, train_on_inputs)


def named_instruction(name: str, table: SourceTable, tokenizer: Tokenizer, train_on_inputs: bool) -> Instruction | None:
    """The format of a name such as `alpaca` or `alpaca:chat`; None for a name that is no instruction format."""
    base, _, style_name = name.partition(":")
    if base not in INSTRUCTIONS or (style_name and style_name not in STYLES):
        return None
    style, fields = INSTRUCTIONS[base]
    own = {part: getattr(table, f"field_{part}") for part in ("instruction", "input", "output", "system")}
    chosen = Fields(**(vars(fields) | {part: value for part, value in own.items() if value is not None}))
    style = STYLES[style_name] if style_name else style
    return Instruction(tokenizer, style, chosen, train_on_inputs, needs_system=fields.system is not None)
