"""The training loop: schedule, steps, checkpoints from which a killed run goes on to the same result."""

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from harness.errors import UserError
from harness.store import write_atomic
from harness.training.data import TextData

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast.

    Args:
        steps: optimiser steps; None: as many as ``minutes`` allow. Only with steps alone does the result not depend on
            the machine's speed: with minutes the rate follows the share of time that has passed.
        minutes: of training, over all resumptions; None: no bound.
        batch_tokens: tokens of a batch, padding included.
        lr: highest learning rate, reached after ``warmup`` of the run, from where it falls as a cosine to a tenth.
        prompt_weight: weight of a position in a prompt; one in a continuation weighs 1.
        clip: largest norm of the gradient.
        checkpoint_minutes: between checkpoints.
        log_steps: between lines of the log.
        eval_minutes: between measurements on held-out texts.
        bfloat16: compute the products in bfloat16; weights and optimiser stay in float32. Measured on two cores with
            AVX512-BF16: one core does 85 GFLOP/s in bfloat16 and 140 in float32 at 128 rows, so it is off.
    """

    steps: int | None = None
    minutes: float | None = 30.0
    batch_tokens: int = 4096
    lr: float = 1e-3
    warmup: float = 0.05
    weight_decay: float = 0.01
    clip: float = 1.0
    prompt_weight: float = 0.2
    checkpoint_minutes: float = 2.0
    log_steps: int = 10
    eval_minutes: float = 10.0
    bfloat16: bool = False

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise UserError("job.schedule.steps and job.schedule.minutes are both null: set one, or both.")
        bounds: Sequence[tuple[str, bool, str]] = (
            ("steps", self.steps is None or self.steps >= 1, "at least 1, or null"),
            ("minutes", self.minutes is None or self.minutes > 0, "more than 0, or null"),
            ("batch_tokens", self.batch_tokens >= 1, "at least 1"),
            ("lr", self.lr > 0, "more than 0"),
            ("warmup", 0 <= self.warmup < 1, "a share of the run, 0 to below 1"),
            ("weight_decay", self.weight_decay >= 0, "0 or more"),
            ("clip", self.clip > 0, "more than 0"),
            ("prompt_weight", self.prompt_weight >= 0, "0 or more"),
            ("checkpoint_minutes", self.checkpoint_minutes >= 0, "0 (after every step) or more"),
            ("log_steps", self.log_steps >= 1, "at least 1"),
            ("eval_minutes", self.eval_minutes >= 0, "0 (after every step) or more"),
        )
        for name, allowed, wanted in bounds:
            if not allowed:
                raise UserError(f"job.schedule.{name}={getattr(self, name)}: want {wanted}.")

    def passed(self, step: int, seconds: float) -> float:
        """Share of the run that is over, 1 at its end."""
        by_steps = step / self.steps if self.steps else 0.0
        by_time = seconds / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(by_steps, by_time))

    def rate(self, passed: float) -> float:
        """Learning rate: linear warm-up, then a cosine from ``lr`` to a tenth of it."""
        if passed < self.warmup:
            return self.lr * (passed + 1e-3) / (self.warmup + 1e-3)
        share = (passed - self.warmup) / (1 - self.warmup)
        return self.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2)


@dataclass(slots=True)
class Progress:
    """Where a run is: steps done, epoch and batch in it that come next, seconds of training, tokens seen."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0
    tokens: int = 0


Losses = Callable[[Sequence[int], int], Tensor]
"""Indices of texts and the step, from which every draw follows -> the mean loss, to be differentiated."""


class Training:
    """A student's parameters with optimiser and position; ``folder`` holds the checkpoint.

    Every draw of a step is seeded by the run's seed and the step, so that the position is the whole state of chance.
    """

    def __init__(
        self, module: torch.nn.Module, data: TextData, schedule: Schedule, seed: int, folder: Path, losses: Losses
    ) -> None:
        self.module, self.data, self.schedule, self.seed, self.folder = module, data, schedule, seed, folder
        self.losses = losses
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=schedule.lr, betas=(0.9, 0.95), weight_decay=schedule.weight_decay
        )
        self.at = Progress()

    @property
    def path(self) -> Path:
        return self.folder / CHECKPOINT

    def resume(self) -> bool:
        """Go back to the last checkpoint, where there is one.

        Raises:
            UserError: it is not readable or of another student.
        """
        if not self.path.is_file():
            return False
        try:
            state = torch.load(self.path, weights_only=True)
            self.module.load_state_dict(state["weights"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.at = Progress(**state["at"])
        except (RuntimeError, KeyError, TypeError, ValueError, EOFError) as error:
            reason = " ".join(str(error).split())[:120]
            raise UserError(
                f"{self.path} cannot be resumed from ({reason}): delete it, or job.overwrite=true."
            ) from error
        return True

    def checkpoint(self) -> None:
        """Write weights, optimiser and position; a kill leaves the old file or the new one."""
        state: dict[str, Any] = {
            "weights": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "at": asdict(self.at),
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_atomic(self.path, buffer.getvalue())

    def run(self) -> Iterator[Mapping[str, float]]:
        """Train to the end of the schedule; yields numbers after every step. Checkpoints now and then and at the end.

        What the caller does between steps is not training time.
        """
        saved = self.at.seconds
        batches = self.data.order(self.seed, self.at.epoch, self.schedule.batch_tokens)
        while (passed := self.schedule.passed(self.at.step, self.at.seconds)) < 1:
            begun = perf_counter()
            if self.at.batch >= len(batches):
                self.at.epoch, self.at.batch = self.at.epoch + 1, 0
                batches = self.data.order(self.seed, self.at.epoch, self.schedule.batch_tokens)
            chosen = batches[self.at.batch]
            rate = self.schedule.rate(passed)
            loss, norm = self.step(chosen, rate)
            tokens = sum(len(self.data.trained[index].tokens) for index in chosen)
            spent = perf_counter() - begun
            self.at.step += 1
            self.at.batch += 1
            self.at.seconds += spent
            self.at.tokens += tokens
            if self.at.seconds - saved >= 60 * self.schedule.checkpoint_minutes:
                self.checkpoint()
                saved = self.at.seconds
            yield {"loss": loss, "lr": rate, "grad_norm": norm, "tokens_s": tokens / spent, "passed": passed}
        self.checkpoint()

    def step(self, chosen: Sequence[int], rate: float) -> tuple[float, float]:
        """One step of AdamW; the loss, and the gradient's norm before it was clipped."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.schedule.bfloat16):
            loss = self.losses(chosen, self.at.step)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.schedule.clip)
        self.optimizer.step()
        return float(loss.detach()), float(norm)
