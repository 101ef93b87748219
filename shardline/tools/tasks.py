"""`shardline eval --tasks`: run tasks of lm-evaluation-harness on one of our models."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardline.checkpoint.assets import end_tokens
from shardline.data.tokenizer import Tokenizer
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.generate import generate
from shardline.registry import nearest
from shardline.storage.atomic import write_atomically
from shardline.tools.saved_model import device_named, open_model, tokenizer_at

MISSING = "--tasks needs lm-evaluation-harness, which is not installed: pip install 'shardline[eval]'"
LONGEST_ANSWER = 256  # tokens, if a task sets no limit


def run(
    folder: Path,
    tasks: str,
    base: str | None,
    tokenizer: str | None,
    device: str | None,
    include_path: str | None,
    num_fewshot: int | None,
    limit: int | None,
    batch_size: int,
    out: str | None,
    json_lines: bool,
) -> int:
    """Evaluate the tasks and print a row for each of their numbers."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(MISSING)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    where, saved = device_named(device), open_model(folder, base)
    location = tokenizer or saved.tokenizer
    words = tokenizer_at(location, folder, saved.architecture)
    names = [name for name in tasks.split(",") if name.strip()]
    if include_path is not None and not Path(include_path).is_dir():
        raise UserError(f"--include-path: {include_path} is not a folder with task files (YAML)")
    manager = TaskManager(include_path=include_path)
    for name in names:
        if name not in manager.all_tasks:
            raise UserError(f"--tasks: there is no task {name!r}{nearest(name, manager.all_tasks)}")
    model = harness_model(saved.build(where), words, end_tokens(words, location), batch_size)
    try:
        found = simple_evaluate(
            model=model, tasks=names, num_fewshot=num_fewshot, limit=limit, task_manager=manager, log_samples=False
        )
    except (OSError, ConnectionError) as error:  # usually data that is not available locally and cannot be downloaded
        raise UserError(f"--tasks {tasks}: {str(error).splitlines()[0]}") from error
    rows = list(_rows(found["results"], found["versions"]))
    if out is not None:
        write_atomically(Path(out), json.dumps({"model": str(folder), "step": saved.step, "results": rows}, indent=1))
    if json_lines:
        print("\n".join(json.dumps(row) for row in rows))
    else:
        print(_table(rows))
    return 0


def _rows(results: dict[str, dict[str, Any]], versions: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield one row per number. Its key is METRIC,FILTER; that of its standard error is METRIC_stderr,FILTER."""
    for task, numbers in results.items():
        for key, value in numbers.items():
            metric, comma, name = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = numbers.get(f"{metric}_stderr,{name}")
            error = error if isinstance(error, int | float) else None
            yield {
                "task": task,
                "version": versions.get(task),
                "metric": metric,
                "filter": name,
                "value": value,
                "stderr": error,
            }


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [("task", "metric", "filter", "value", "stderr")]
    for row in rows:
        error = "" if row["stderr"] is None else f"{row['stderr']:.4f}"
        lines.append((row["task"], row["metric"], row["filter"], f"{row['value']:.4f}", error))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def harness_model(model: Decoder, tokenizer: Tokenizer, ends: Sequence[int], batch_size: int) -> Any:
    """Return the model with the harness's interface: log-likelihoods of continuations and of texts, and answers.

    The class is defined here because its parent class comes with the optional package.
    """
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    first = next((one for one in (tokenizer.bos_id, tokenizer.eos_id) if one is not None), 0)
    longest, device = model.arch.max_seq_len, next(model.parameters()).device

    class EvaluatedModel(TemplateLM):
        @property
        def eot_token_id(self) -> int:
            return first if tokenizer.eos_id is None else tokenizer.eos_id

        @property
        def prefix_token_id(self) -> int:
            return first

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return tokenizer.encode(string)

        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            pairs = [(context, continuation) for _, context, continuation in requests]
            return log_likelihoods(model, pairs, longest, batch_size, device)

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            found = []
            for request in requests:
                (text,) = request.args
                windows = get_rolling_token_windows(
                    token_list=tokenizer.encode(text), prefix_token=first, max_seq_len=longest, context_len=1
                )
                pairs = [make_disjoint_window(window) for window in windows]
                found.append(sum(one for one, _ in log_likelihoods(model, pairs, longest, batch_size, device)))
            return found

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return [answer(model, tokenizer, ends, *request.args) for request in requests]

    return EvaluatedModel()


@torch.no_grad()
def log_likelihoods(
    model: Decoder, pairs: Sequence[tuple[list[int], list[int]]], longest: int, batch_size: int, device: torch.device
) -> list[tuple[float, bool]]:
    """Return each continuation's log-probability after its context, and whether it is the likeliest one.

    The longest pairs come first, so that running out of memory shows at once. Pairs that are too long lose their start.
    """
    order = sorted(range(len(pairs)), key=lambda number: -sum(map(len, pairs[number])))
    found: dict[int, tuple[float, bool]] = {}
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        rows = [(pairs[number][0] + pairs[number][1])[-(longest + 1) :] for number in numbers]
        tokens = torch.zeros((len(rows), max(map(len, rows)) - 1), dtype=torch.int64)
        for row, given in zip(tokens, rows, strict=True):
            row[: len(given) - 1] = torch.tensor(given[:-1])
        hidden = model.hidden(tokens.to(device))
        for place, (number, given) in enumerate(zip(numbers, rows, strict=True)):
            wanted = torch.tensor(pairs[number][1][-longest:], device=device)
            states = hidden[place, len(given) - 1 - len(wanted) : len(given) - 1]
            logits: Tensor = states if model.gives_logits else model.logits(states)
            chosen = logits.float().log_softmax(-1)
            likely = bool((chosen.argmax(-1) == wanted).all())
            found[number] = (float(chosen.gather(1, wanted[:, None]).double().sum()), likely)
    return [found[number] for number in range(len(pairs))]


def answer(model: Decoder, tokenizer: Tokenizer, ends: Sequence[int], context: str, options: dict[str, Any]) -> str:
    """Return the generated text up to the first of the task's stop texts."""
    until = options.get("until") or []
    until = [until] if isinstance(until, str) else list(until)
    most = int(options.get("max_gen_toks", LONGEST_ANSWER))
    temperature = float(options.get("temperature") or 0.0) if options.get("do_sample", True) else 0.0
    prompt = tokenizer.encode(context)[-max(1, model.arch.max_seq_len - most) :]
    tokens: list[int] = []
    for token in generate(model, prompt, most, temperature, options.get("top_k"), options.get("top_p"), list(ends)):
        if token in ends:
            break
        tokens.append(token)
        text = tokenizer.decode(tokens)
        if any(end in text for end in until):
            break
    text = tokenizer.decode(tokens)
    return min((text.split(end, 1)[0] for end in until if end), key=len, default=text)
