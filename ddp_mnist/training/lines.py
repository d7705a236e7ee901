"""The lines of a run while it trains: of a step, and of an epoch."""

from typing import Any

from tqdm import tqdm

from ddp_mnist.core.evaluation import EvalResult
from ddp_mnist.core.run import mean_text
from ddp_mnist.training.scores import number_text, score_texts


def step_line(
    line: dict[str, Any], step: int, total_steps: int, left_s: float | None, phase: str = ""
) -> str:
    """Return the line of an optimizer step, in 70 columns; a phase replaces the learning rate.

    `line` is the line for metrics.jsonl, {} before the first step; `left_s` is the time left in
    seconds, None if unknown.
    """
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    parts += [f"loss {mean_text(line['loss'])}"] if line else []
    parts += [phase or f"lr {line['lr']:.5f}"]
    if speed := line.get("images_per_second"):
        parts += [f"{speed:,.0f} images/s"]
    if left_s is not None:
        parts += [f"{tqdm.format_interval(left_s)} left"]
    return "  ".join(parts)


def epoch_line(
    epoch: int, epochs: int, means: dict[str, Any], validation: EvalResult | None, score: str
) -> str:
    """Return the line of `epoch`, counted from 0, that has ended; `score` is its name."""
    parts = [f"epoch {epoch + 1:>{len(str(epochs))}}/{epochs}", f"loss {mean_text(means['loss'])}"]
    parts += [f"{score} {number_text(means['score'])}"] if means["score"] is not None else []
    parts += [f"{means['images_per_second']:>6,.0f} images/s"]
    if validation:
        validated = f"validation {number_text(validation.score)}"
        parts += [validated, *score_texts(validation.scores)]
    return "  ".join(parts)
