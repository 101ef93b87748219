"""Loss scaling for float16: the loss is multiplied by S, so that small gradients do not become 0, and the step divides.

    loss x S -> backward -> gradients x S, summed in float32 -> norm / S -> clip and divide by S -> update
                            inf or nan: the step is skipped, S halves;  2,000 good steps: S doubles

S is a power of two, so multiplying and dividing by it causes no rounding. It is saved with the run.
"""

from __future__ import annotations

from shardline.errors import UserError

FIRST, LEAST = 2.0**16, 2.0**-14
GOOD_STEPS = 2000


class LossScale:
    """The factor S and the number of good steps since it changed; constant 1 if `dynamic` is off."""

    def __init__(self, dynamic: bool) -> None:
        self.dynamic, self.value, self.good_steps = dynamic, FIRST if dynamic else 1.0, 0

    def advance(self) -> None:
        """Count a good step; after GOOD_STEPS of them, double the factor."""
        self.good_steps += 1
        if self.dynamic and self.good_steps == GOOD_STEPS:
            self.value, self.good_steps = self.value * 2, 0

    def back_off(self, step: int) -> None:
        """Halve the factor after nonfinite gradients; raise once the factor cannot be the cause."""
        self.value, self.good_steps = self.value / 2, 0
        if self.value < LEAST:
            raise UserError(
                f"step {step}: gradients are not finite at any loss scale: float16's range is too small for this model;"
                ' set training.mixed_precision_param = "bfloat16" or "float32"'
            )

    def state(self) -> tuple[float, int]:
        return self.value, self.good_steps

    def load(self, state: tuple[float, int]) -> None:
        if self.dynamic and state[0] > 0:
            self.value, self.good_steps = state[0], int(state[1])
