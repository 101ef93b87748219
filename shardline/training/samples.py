"""Samples: continues given prompts while the model trains, on every layout.

Each new token takes one forward pass of a batch of the training shape, on the same path as validation: no KV cache, and
nothing compiled for other lengths.

    row        | prompt | new tokens | 0 0 0 ... 0 |    S tokens; causal attention does not see what comes later
                             ^ the logits after this token are on the last pp stage, on the cp rank with this position,
                               and on every tp rank for its rows of the vocabulary
    all ranks  add up the logits, which are zero elsewhere; rank 0 chooses the token and sends it to the others
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from shardline.checkpoint.assets import end_tokens, tokenizer_of_run
from shardline.comm import collectives
from shardline.comm.mesh import Mesh
from shardline.config.schema import Config
from shardline.data.batch import IGNORE, Batch
from shardline.data.formats.prompts import prompt_tokens
from shardline.data.tokenizer import Tokenizer
from shardline.models.generate import choose
from shardline.parallel.data.fsdp import free_gathered
from shardline.run.device import read
from shardline.run.stop import Request
from shardline.telemetry.telemetry import Telemetry
from shardline.training.step import Stepper

log = logging.getLogger("shardline")
ENDED, NOT_FINITE = -1, -2  # instead of a token


class Prompt:
    """One text to continue: its tokens so far, and the random generator that draws the next ones."""

    def __init__(self, text: str, tokens: Sequence[int], seed: int) -> None:
        self.text, self.tokens, self.first = text, list(tokens), len(tokens)
        self.generator = torch.Generator("cpu").manual_seed(seed)
        self.ended = False

    @property
    def new(self) -> list[int]:
        return self.tokens[self.first :]


class PromptSampler:
    """Samples after the first step, the last one and every `generation.freq` steps, if there are prompts."""

    def __init__(
        self,
        config: Config,
        stepper: Stepper,
        tokenizer: Tokenizer,
        mesh: Mesh,
        device: torch.device,
        last_step: int,
        telemetry: Telemetry,
        requests: Callable[[], Request],
    ) -> None:
        self.config, self.section, self.stepper, self.mesh = config, config.generation, stepper, mesh
        self.tokenizer, self.device, self.last_step = tokenizer, device, last_step
        self.telemetry, self.requests = telemetry, requests
        self.length = config.training.seq_len
        self.rows = config.training.local_batch_size * (2 if config.training.objective == "dpo" else 1)
        self.ends: list[int] | None = None

    def is_due(self, step: int) -> bool:
        return bool(self.section.prompts) and (step in (1, self.last_step) or step % self.section.freq == 0)

    def run_if_due(self, step: int, request: Request) -> Request:
        """Sample if it is time to; returns `request` with the requests made to any rank meanwhile."""
        if not self.is_due(step) or request.stop is not None:
            return request
        with self.telemetry.paused("sampling"), self.stepper.global_weights():
            began = time.perf_counter()
            prompts, request = self._continued(request)
            if request.stop is not None:
                log.info("step %d: stopping, samples are skipped", step)
            elif prompts is None:
                log.warning("step %d: no samples, because the model's logits are not finite", step)
            else:
                self.telemetry.log_samples(step, self._described(prompts), time.perf_counter() - began)
        return request

    def _described(self, prompts: Sequence[Prompt]) -> Iterator[tuple[str, str, list[int]]]:
        """(prompt, text, new tokens) of each sample; the text of a token may depend on the one before it."""
        for prompt in prompts:
            before = self.tokenizer.decode(prompt.tokens[: prompt.first])
            yield prompt.text, self.tokenizer.decode(prompt.tokens)[len(before) :], prompt.new

    @torch.no_grad()
    def _continued(self, request: Request) -> tuple[list[Prompt] | None, Request]:
        """Return all prompts with their new tokens, or None if logits are not finite. Every rank calls this."""
        section, model = self.section, self.stepper.model
        prompts = [Prompt(text, prompt_tokens(self.tokenizer, text), section.seed) for text in section.prompts]
        self.stepper.float8_gather.prepare()
        was_training = model.training
        model.eval()
        finite = True
        for start in range(0, len(prompts), self.rows):
            together = prompts[start : start + self.rows]
            for _ in range(section.max_new_tokens):
                if request.stop is not None or not finite or all(prompt.ended for prompt in together):
                    break
                finite = self._add_tokens(together)
                request = request.and_then(self.requests())
        free_gathered(model)
        model.train(was_training)
        return prompts if finite else None, request

    def _add_tokens(self, prompts: Sequence[Prompt]) -> bool:
        """Add a token to each prompt that has not ended, the same on all ranks; returns whether logits were finite."""
        logits = self._logits(prompts)
        chosen = torch.zeros(len(prompts), dtype=torch.float64, device=self.device)  # holds any token exactly
        if self.mesh.rank == 0:
            choices = [self._choice(prompt, row) for prompt, row in zip(prompts, logits.cpu(), strict=True)]
            chosen.copy_(torch.tensor(choices, dtype=torch.float64))
        if self.mesh.world_size > 1:
            collectives.sum_in_place(chosen, "world")
        tokens = [int(token) for token in read(chosen)]
        if NOT_FINITE in tokens:
            return False
        for prompt, token in zip(prompts, tokens, strict=True):
            if not prompt.ended:
                prompt.tokens.append(token)
                prompt.ended = token in self._ends()
        return True

    def _choice(self, prompt: Prompt, logits: Tensor) -> int:
        if prompt.ended:
            return ENDED
        if not logits.isfinite().all():
            return NOT_FINITE
        return choose(logits, self.section.temperature, self.section.top_k, None, prompt.generator)

    def _ends(self) -> list[int]:
        """The tokens that end a text, read late: the run's own tokenizer is written together with its folder."""
        if self.ends is None:
            self.ends = self.mesh.from_rank_0(lambda: end_tokens(self.tokenizer, tokenizer_of_run(self.config)))
        return self.ends

    def _logits(self, prompts: Sequence[Prompt]) -> Tensor:
        """(prompts, V) float32: the logits of the next tokens, computed by data rank 0, the same on every rank."""
        tokens = torch.zeros((self.rows, self.length), dtype=torch.int64)
        for row, prompt in zip(tokens, itertools.cycle(prompts), strict=False):
            row[: len(prompt.tokens)] = torch.tensor(prompt.tokens)
        last = torch.tensor([len(prompt.tokens) - 1 for prompt in prompts])
        places = torch.arange(self.length).expand(self.rows, -1)
        documents = None
        if self.stepper.model.arch.attn_mask_type == "block_causal":
            documents = torch.zeros((self.rows, self.length), dtype=torch.int32)
        batch = Batch(tokens, torch.full_like(tokens, IGNORE), documents, torch.full((self.rows,), -1)).to(self.device)
        context = self.stepper.model.context
        if context is not None:
            batch, places = context.cut(batch), context.own(places)
        hits = places[: len(prompts)] == last[:, None]
        at = torch.full((self.rows,), -1)
        at[: len(prompts)] = torch.where(hits.any(1), hits.int().argmax(1), -1)
        logits = self.stepper.passes.logits_at(batch, at.tolist())[: len(prompts)]
        if self.mesh.world_size > 1:
            if self.mesh.data_rank != 0:
                logits.zero_()
            collectives.sum_in_place(logits, "world")
        return logits
