"""Commands that measure, predict and draw: bench, doctor, trace, plan, schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardline.cli.common import ITERATIONS, JSON, RENDEZVOUS, load, placing, processes
from shardline.cli.parser import Command, Option, Parsed
from shardline.config.names import DTYPES, SCHEDULES
from shardline.errors import UserError

if TYPE_CHECKING:
    from shardline.run.options import TrainOptions


def _bench_comm(parsed: Parsed) -> int:
    if parsed.options["tp"] is not None:
        parsed.flags.append(f"--parallelism.tensor_parallel_degree={parsed.options['tp']}")
    config = load(parsed.file, parsed.flags)
    from shardline.tools.bench.comm import run

    options = parsed.named("sizes", "ops", "dim", "dtype", "iterations", "json")
    return run(config, _start_options(parsed), **options)


def _bench_overlap(parsed: Parsed) -> int:
    keys = {"model": "model.name", "flavor": "model.flavor", "tp": "parallelism.tensor_parallel_degree"}
    parsed.flags += [f"--{key}={parsed.options[name]}" for name, key in keys.items()]
    config = load(parsed.file, parsed.flags, check_model=True)
    from shardline.tools.bench.overlap import run

    options = parsed.named("seq", "batch", "backend", "dtype", "iterations", "json")
    return run(config, _start_options(parsed), **options)


def _bench_experts(parsed: Parsed) -> int:
    keys = {"model": "model.name", "flavor": "model.flavor", "ep": "parallelism.expert_parallel_degree"}
    parsed.flags += [f"--{key}={parsed.options[name]}" for name, key in keys.items()]
    config = load(parsed.file, parsed.flags, check_model=True)
    from shardline.tools.bench.experts import run

    options = parsed.named("tokens", "skew", "dtype", "float8", "compile", "carrier", "iterations", "json")
    return run(config, _start_options(parsed), **options)


def _bench_device(parsed: Parsed) -> int:
    config = load(None, [])
    from shardline.tools.bench.device import run

    return run(config, _start_options(parsed), **parsed.named("write", "json"))


def _doctor(parsed: Parsed) -> int:
    config = load(parsed.file, parsed.flags, check_model=bool(parsed.file or parsed.flags))
    from shardline.tools.doctor.doctor import run

    with placing(config):
        named = bool(parsed.file or parsed.flags)
        return run(config, _start_options(parsed), named=named, json=parsed.options["json"])


def _start_options(parsed: Parsed) -> TrainOptions:
    """How the ranks of a benchmark start; nproc 0 leaves their number to the layout."""
    from shardline.run.options import TrainOptions

    meeting = ("nnodes", "node_rank", "rdzv_id", "rdzv_backend", "rdzv_endpoint", "rdzv_secret_file")
    named = parsed.named(*meeting, "debug")
    return TrainOptions(nproc=parsed.options["nproc"] or 0, words=parsed.words, **named)


def _plan(parsed: Parsed) -> int:
    named = parsed.named()
    keys = {"model": "model.name", "flavor": "model.flavor", "seq": "training.seq_len"}
    given = {key: named.pop(name) for name, key in keys.items()}
    fixed = _fixed(parsed.flags)
    parsed.flags += [f"--{key}={value}" for key, value in given.items() if value is not None]
    if not parsed.file and not parsed.flags:
        raise UserError("shardline plan: name a config FILE, a --preset, or --model NAME --flavor SIZE")
    config = load(parsed.file, parsed.flags, check_model=True)
    if given["model.name"] is not None and not parsed.file and "compile.enable" not in fixed:
        config = config.replace({"compile.enable": True})
    with placing(config):
        from shardline.plan.command import command

        return command(config, fixed, **named)


def _fixed(flags: Sequence[str]) -> dict[str, Any]:
    """Keys that the command line sets: the search leaves them as they are."""
    from shardline.config.flags import parse_flags

    return dict(parse_flags(flags).values)


def _schedule(parsed: Parsed) -> int:
    from shardline.tools.schedule import command

    if not parsed.file and not parsed.flags:
        return command(None, **parsed.named())
    keys = {"pp": "degree", "schedule": "schedule", "csv": "schedule_csv"}
    given = {key: parsed.options[name] for name, key in keys.items() if parsed.options[name] is not None}
    if "schedule" in given:
        given.setdefault("schedule_csv", None)  # that of the config would be drawn instead
    parsed.flags += [f"--parallelism.pipeline_parallel_{key}={value}" for key, value in given.items()]
    config = load(parsed.file, parsed.flags, check_model=True)
    with placing(config):
        return command(config, **parsed.named())


_BENCH_DTYPE = Option(
    "dtype", f"{', '.join(DTYPES)}; unset: bfloat16 on a GPU, else float32.", str, "TYPE", choices=DTYPES
)
_CARRIERS = ("all_to_all", "symmetric")
_OPS = "all_reduce, all_gather, reduce_scatter, all_to_all, p2p"
BENCH_COMM = Command(
    "bench comm",
    "Measure the speed of collectives over one mesh axis, by size.",
    ("[FILE]",),
    (
        Option("sizes", "A size, a doubling range, or a list: 1M, 1M:2G, 4K,1M.", str, "SIZES", default="1M:64M"),
        Option("ops", "Collectives, by comma.", str, "NAMES", default=_OPS),
        Option("dim", "Mesh axis: tp, dp_shard, ..., or world for all ranks.", str, "NAME", default="world"),
        Option("tp", "Tensor-parallel ranks; --parallelism.* sets the rest of the layout.", int, "N", low=1),
        Option("dtype", f"{', '.join(DTYPES)}.", str, "TYPE", choices=DTYPES, default="float32"),
        ITERATIONS,
        JSON,
        processes("; unset: as many as the layout needs"),
        *RENDEZVOUS,
    ),
    _bench_comm,
    config_flags=True,
    details="Bandwidths are counted as nccl-tests count them. Without a layout, the axis has all ranks.",
    examples=(
        "shardline bench comm --sizes 1M:2G --nproc 2",
        "shardline bench comm run.toml --dim tp --ops all_gather,reduce_scatter --dtype bfloat16",
        "shardline bench comm --dim tp --tp 2 --parallelism.data_parallel_shard_degree 2 --json",
    ),
)
BENCH_OVERLAP = Command(
    "bench overlap",
    "Measure the overlapped tensor-parallel products of a model against collective-then-multiply.",
    (),
    (
        Option("model", "Model family.", str, "NAME", default="llama3"),
        Option("flavor", "Size of the model.", str, "NAME", default="8B"),
        Option("tp", "Tensor-parallel ranks.", int, "N", default=2, low=1),
        Option("seq", "Tokens per sequence.", int, "N", default=8192, low=1),
        Option("batch", "Sequences per micro-batch.", int, "N", default=1, low=1),
        Option("backend", "Measure this backend beside serial; unset: every one that can run.", str, "NAME"),
        _BENCH_DTYPE,
        ITERATIONS,
        JSON,
        processes("; unset: as many as --tp needs"),
        *RENDEZVOUS,
    ),
    _bench_overlap,
    config_flags=True,
    examples=(
        "shardline bench overlap --model llama3 --flavor 8B --tp 2 --seq 8192 --batch 1",
        "shardline bench overlap --flavor debugmodel --tp 2 --seq 256 --backend ring --json",
    ),
)
BENCH_EXPERTS = Command(
    "bench experts",
    "Measure how fast tokens are sent to experts on other ranks, and how much of that a layer hides.",
    (),
    (
        Option("model", "Model family.", str, "NAME", default="deepseek_v3"),
        Option("flavor", "Size of the model.", str, "NAME", default="16B"),
        Option("ep", "Expert-parallel ranks.", int, "N", default=2, low=1),
        Option("tokens", "Tokens of each rank; unset: 8192 on a GPU, else 512.", int, "N", low=2),
        Option("skew", "Second routing: rows of the fullest rank over the mean; 1: none.", float, "X", (), (), 2.5, 1),
        _BENCH_DTYPE,
        Option("float8", "Send tokens to the experts in float8.", bool),
        Option("compile", "Compile the layer, as compile.enable does.", bool),
        Option("carrier", "all_to_all or symmetric; unset: every one that can run.", str, "NAME", choices=_CARRIERS),
        ITERATIONS,
        JSON,
        processes("; unset: as many as --ep needs"),
        *RENDEZVOUS,
    ),
    _bench_experts,
    config_flags=True,
    details="Both for a balanced routing and a skewed one, in which one rank gets --skew times the mean number of rows,"
    "\nat most 0.9 of all rows.",
    examples=(
        "shardline bench experts --model deepseek_v3 --flavor 16B --ep 2 --tokens 8192",
        "shardline bench experts --model qwen3 --flavor 30B-A3B --ep 8 --skew 4 --float8",
        "shardline bench experts --flavor debugmodel --ep 2 --json",
    ),
)
BENCH_DEVICE = Command(
    "bench device",
    "Measure this machine: matrix products by shape and type, attention, copies, and with --nproc collectives.",
    (),
    (
        Option("write", "Also write a profile, which `shardline plan --gpu FILE` reads.", str, "FILE"),
        JSON,
        processes("; unset: one, without collectives"),
        *RENDEZVOUS,
    ),
    _bench_device,
    examples=(
        "shardline bench device",
        "shardline bench device --write mine.toml --nproc 8",
        "shardline plan run.toml --gpus 64 --gpu mine.toml",
    ),
)
DOCTOR = Command(
    "doctor",
    "Examine this machine, or all ranks of a job: what would break a run or slow it down, and the remedy.",
    ("[FILE]",),
    (JSON, processes("; unset: one, without links between ranks"), *RENDEZVOUS),
    _doctor,
    config_flags=True,
    details="FILE: a config, whose checkpoints must have room on the disk. Exit code 1: something would break a run."
    "\nUnder torchrun or srun it examines the ranks that are there. docs/doctor.md explains each finding.",
    examples=(
        "shardline doctor",
        "shardline doctor run.toml --nproc 8",
        "torchrun --nproc-per-node 8 -m shardline doctor --json",
    ),
)
TRACE_OVERLAP = Command(
    "trace overlap",
    "Report how much communication profiler traces contain, and how much of it computation hides.",
    ("TRACE...",),
    (JSON,),
    "shardline.tools.trace:command",
    details="TRACE: .json or .json.gz of one rank, as `--profiling.enable_profiling` writes them, one per rank,"
    "\nor the folder of a run, which stands for its last profile.",
    examples=(
        "shardline trace overlap outputs/run",
        "shardline trace overlap outputs/run/profile_traces/iteration_10/rank*_trace.json",
    ),
)
TRACE_KERNELS = Command(
    "trace kernels",
    "Report where the time of a step goes: kinds of kernels, idle gaps and the most expensive kernels.",
    ("TRACE...",),
    (Option("top", "Kernels to list.", int, "N", default=15, low=0), JSON),
    "shardline.tools.trace_kernels:command",
    details="TRACE: as for `shardline trace overlap`; the table is the mean of all steps of all traces."
    "\nWithout a GPU, operations of the main thread count, each without those that it calls.",
    examples=(
        "shardline trace kernels outputs/run",
        "shardline trace kernels outputs/run/profile_traces/iteration_10/rank0_trace.json --top 30",
    ),
)
PLAN = Command(
    "plan",
    "Predict which layouts fit a number of GPUs, and how fast each will be, without running anything.",
    ("[FILE]",),
    (
        Option("gpus", "Number of GPUs.", int, "N", low=1),
        Option("nodes", "Number of machines, instead of --gpus.", int, "N", low=1),
        Option("gpu", "Kind of GPU, or a profile (FILE.toml); unset: this machine's.", str, "NAME"),
        Option("gpus-per-node", "GPUs of one machine; unset: as the profile says.", int, "N", low=1),
        Option("model", "Model family, if there is no FILE.", str, "NAME"),
        Option("flavor", "Size of the model.", str, "NAME"),
        Option("seq", "Tokens per sequence.", int, "N", low=1),
        Option("global-batch", "Sequences per step; unset: the config's.", int, "N", low=1),
        Option("top", "Layouts to show.", int, "N", default=10, low=1),
        Option("goal", "What is best: speed, memory or cost.", str, "NAME", (), ("speed", "memory", "cost"), "speed"),
        Option("price", "Price of a GPU hour, for --tokens.", float, "X", low=0),
        Option("tokens", "Also predict how long this many tokens take.", float, "N", low=1),
        Option("write", "Write the best layout as a config.", str, "FILE"),
        Option("check", "Only say whether FILE fits as it is; exit code 1 if not.", bool),
        JSON,
    ),
    _plan,
    config_flags=True,
    details="Flags --section.key=value fix keys: the search leaves them as they are. Profiles: `shardline bench device`"
    "\nmeasures one; docs/planner.md says what is assumed, and how far predictions are off.",
    examples=(
        "shardline plan run.toml --gpus 256 --gpu h100",
        "shardline plan --model llama3 --flavor 70B --seq 8192 --global-batch 1024 --gpus 512 --gpu h100 --top 3",
        "shardline plan run.toml --gpus 64 --gpu h200 --parallelism.tensor_parallel_degree=8",
        "shardline plan --check run.toml --gpus 8 --gpu a100",
    ),
)
TRACE_HANG = Command(
    "trace hang",
    "Compare the flight recorders of a job's ranks: which collective did not end, and which ranks are missing.",
    ("RUN",),
    (JSON,),
    "shardline.tools.trace_hang:command",
    details="RUN: the folder of a run, or that of the files. A hang writes them, and so does SIGUSR2 to the launcher.",
    examples=("shardline trace hang outputs/run",),
)
SCHEDULE = Command(
    "schedule",
    "Draw a pipeline schedule and report its cost, without running anything.",
    ("[FILE]",),
    (
        Option("pp", "Pipeline ranks.", int, "N", low=1),
        Option("microbatches", "Micro-batches per step.", int, "N", low=1),
        Option("schedule", "Name of the schedule; unset: the config's, or 1F1B.", str, "NAME"),
        Option("stages-per-rank", "Stages on each rank; unset: the fewest possible.", int, "N", low=1),
        Option("csv", "Read the schedule, its ranks and micro-batches from this file.", str, "FILE"),
        Option("svg", "Also write the drawing to this file.", str, "FILE"),
        Option("compare", "Print a table of all schedules instead.", bool),
        Option("json", "Print one JSON object per schedule, with the time of each action.", bool),
    ),
    _schedule,
    config_flags=True,
    details=f"""\
NAME: {", ".join(SCHEDULES)}.
FILE, --preset and --section.key flags give a config: its schedule is drawn, with stages cut as a run cuts them and
passes as long as their layers have work. --pp, --microbatches, --schedule, --stages-per-rank and --csv replace what
it says; a schedule of --csv must have as many ranks and micro-batches.""",
    examples=(
        "shardline schedule run.toml",
        "shardline schedule run.toml --pp 8 --microbatches 32 --compare",
        "shardline schedule --pp 8 --microbatches 32 --schedule Interleaved1F1B --stages-per-rank 2",
        "shardline schedule --pp 4 --microbatches 8 --schedule ZBVZeroBubble --svg zbv.svg",
        "shardline schedule --pp 8 --microbatches 32 --compare",
        "shardline schedule --csv mine.csv",
    ),
)
