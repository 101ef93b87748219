"""Compares the losses of a model of about 100 million parameters in bfloat16 and float8 on the same data.

    python benchmarks/convergence.py --plot docs/float8.svg       # 2,000 steps of each, on a GPU
    python benchmarks/convergence.py --steps 20 --emulate         # on a CPU, a tiny model

One JSON line each: `loss` is the mean over the last tenth of the steps, `apart` its distance from that of bfloat16.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

RECIPES = ("bfloat16", "tensorwise", "rowwise", "rowwise_with_gw_hp")
MODEL = {"dim": 768, "n_layers": 12, "n_heads": 12, "n_kv_heads": 4, "head_dim": 64, "ffn_dim": 2304, "vocab_size": 512}
TINY = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 128, "vocab_size": 512}
EVERY = 5  # steps between the losses that are read
COLORS = ("#222222", "#d1495b", "#00798c", "#edae49")
WIDTH, HEIGHT, EDGE = 720, 360, 48


def losses(recipe: str, options: argparse.Namespace) -> list[float]:
    sizes = TINY if options.emulate else MODEL
    words = [f"--model.overrides.{key}={value}" for key, value in sizes.items()]
    words += ["--training.dataset=demo", f"--training.seq_len={options.seq_len}", f"--training.steps={options.steps}"]
    words += [f"--training.local_batch_size={options.batch}", f"--metrics.log_freq={EVERY}", "--optimizer.lr=6e-4"]
    words += [f"--lr_scheduler.warmup_steps={options.steps // 20}", "--training.mixed_precision_param=bfloat16"]
    if not options.emulate:
        words += ["--compile.enable"]
    if recipe != "bfloat16":
        section = "quantize.linear.float8"
        words += [f"--model.converters={section}", f"--{section}.recipe_name={recipe}"]
        words += [f"--{section}.emulate"] if options.emulate else []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "shardline", "train", *words, f"--job.dump_folder={folder}/run"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        rows = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["loss"] for row in rows]


def smoothed(values: list[float], over: int) -> list[float]:
    return [statistics.fmean(values[max(0, place - over + 1) : place + 1]) for place in range(len(values))]


def drawing(curves: dict[str, list[float]]) -> str:
    """Return an SVG of the losses, each averaged over the preceding hundredth of the steps."""
    shown = {name: smoothed(values, max(1, len(values) // 100)) for name, values in curves.items()}
    steps = max(map(len, shown.values()))
    low, high = min(map(min, shown.values())), max(map(max, shown.values()))

    def place(step: int, loss: float) -> str:
        x = EDGE + (WIDTH - 2 * EDGE) * step / max(1, steps - 1)
        y = EDGE + (HEIGHT - 2 * EDGE) * (high - loss) / (high - low)
        return f"{x:.1f},{y:.1f}"

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">']
    parts.append('<rect width="100%" height="100%" fill="white"/>')
    for number, (color, (name, values)) in enumerate(zip(COLORS, shown.items(), strict=False)):
        points = " ".join(place(step, values[step]) for step in range(0, len(values), max(1, steps // 400)))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.2"/>')
        y = EDGE + 18 * number
        parts.append(f'<text x="{WIDTH - 250}" y="{y}" font-size="13" fill="{color}">{name}: {values[-1]:.4f}</text>')
    for loss, y in ((high, EDGE), (low, HEIGHT - EDGE)):
        parts.append(f'<text x="8" y="{y}" font-size="12">{loss:.2f}</text>')
    parts.append(f'<text x="{EDGE}" y="{HEIGHT - 12}" font-size="12">loss over {EVERY * steps:,} steps</text></svg>')
    return "\n".join(parts) + "\n"


def main() -> None:
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--emulate", action="store_true", help="a tiny model, on any device")
    parser.add_argument("--together", action="store_true", help="run all at once, each on a part of a large GPU")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    recipes, curves = options.recipes.split(","), dict[str, list[float]]()
    with ThreadPoolExecutor(len(recipes) if options.together else 1) as pool:
        runs = {recipe: pool.submit(losses, recipe, options) for recipe in recipes}
    for recipe in recipes:
        curves[recipe] = runs[recipe].result()
        last = {name: statistics.fmean(values[-max(1, len(values) // 10) :]) for name, values in curves.items()}
        apart = last[recipe] / last[recipes[0]] - 1
        row = {"benchmark": "convergence", "recipe": recipe, "loss": last[recipe], "apart": apart}
        about = {
            "steps": options.steps,
            "device": device,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        print(json.dumps({**row, **about}), flush=True)
    if options.plot is not None:
        options.plot.write_text(drawing(curves))


if __name__ == "__main__":
    main()
