"""What is told of a run from outside: the doctor before it, and while it goes on its metrics, notices and files."""

from __future__ import annotations

from tests.mutations.change import Change

DOCTOR = "tests/unit/tools/test_doctor.py::test_"
WATCH = "tests/unit/telemetry/test_watching.py::test_"
PROMETHEUS = "tests/unit/telemetry/test_prometheus.py::test_"
TAIL = "tests/unit/show/test_tail.py::test_"
CONSOLE = "tests/unit/telemetry/test_console.py::test_"

DOCTORS = [
    Change(
        "the doctor ends with 0 whatever it finds",
        "tools/doctor/doctor.py",
        "return 1 if broken else 0",
        "return 0",
        f"{DOCTOR}what_breaks_a_run_ends_with_1",
    ),
    Change(
        "a checkpoint that does not fit is no error",
        "tools/doctor/findings.py",
        "if place.free < need.size:",
        "if False:",
        f"{DOCTOR}what_is_wrong_with_a_job_is_named",
    ),
    Change(
        "a slow device among fast ones is not named",
        "tools/doctor/findings.py",
        "rate.measured < BEHIND * usual",
        "False",
        f"{DOCTOR}a_device_behind_the_others_is_named_by_its_rank",
    ),
    Change(
        "locks are believed without a second process",
        "tools/doctor/storage.py",
        'return "two processes get the same lock"',
        'return ""',
        f"{DOCTOR}locks_that_keep_nobody_out_are_noticed",
    ),
    Change(
        "a control group's cores are not read",
        "tools/doctor/host.py",
        "return int(quota) / int(period) if int(quota) > 0 else None",
        "return None",
        f"{DOCTOR}the_quota_of_a_control_group",
    ),
    Change(
        "clocks are compared without the way of the answer",
        "tools/doctor/ranks.py",
        "there - (asked + answered) / 2",
        "there - asked",
        f"{DOCTOR}clocks_are_compared_at_the_fastest_answer",
    ),
    Change(
        "ways between GPUs all count as NVLink",
        "tools/doctor/findings.py",
        'way.startswith("NV") or way == "X" for way in row',
        "True for way in row",
        f"{DOCTOR}the_words_of_nvidia_smi_are_understood",
    ),
]

NOTICES = [
    Change(
        "slow ranks are not named",
        "telemetry/telemetry.py",
        "if self.mesh.rank != 0 or not paces:",
        "if True:",
        f"{WATCH}a_run_names_the_rank_whose_data_comes_late",
    ),
    Change(
        "ranks of all stages are compared",
        "telemetry/slow_ranks.py",
        "other != rank and self.stages[other] == self.stages[rank]",
        "other != rank",
        f"{WATCH}ranks_of_other_stages_and_single_slow_steps_are_no_slow_ranks",
    ),
    Change(
        "one slow step makes a slow rank",
        "telemetry/slow_ranks.py",
        "self.slow_rows[rank] + 1 if is_slow else 0",
        "self.slow_rows[rank] + is_slow",
        f"{WATCH}ranks_of_other_stages_and_single_slow_steps_are_no_slow_ranks",
    ),
    Change(
        "a jump of the loss is not told",
        "telemetry/telemetry.py",
        "*filter(None, [jump])",
        "*()",
        f"{WATCH}a_run_tells_of_a_jump",
    ),
    Change(
        "a noisy loss jumps",
        "telemetry/loss_watch.py",
        "max(WIDE * spread, SHARE * abs(usual))",
        "spread",
        f"{WATCH}what_is_no_spike",
    ),
    Change(
        "the heartbeat does not say that a run failed",
        "telemetry/heartbeat.py",
        'self.beat("failed", error=',
        'self.beat("ended", error=',
        f"{WATCH}a_loss_that_is_no_number_is_named_with_what_is_done",
    ),
    Change(
        "the heartbeat trains while it validates",
        "training/validate.py",
        'self.telemetry.paused("validating")',
        'self.telemetry.paused("training")',
        f"{WATCH}the_heartbeat_says_what_a_run_does",
    ),
    Change(
        "a narrow live line keeps long numbers and loses others",
        "telemetry/console.py",
        "line = fitted(self._text(plain, short=True), ",
        "line = fitted(text, ",
        "tests/unit/telemetry/test_console.py::test_the_live_line_gives_up_what_matters_least",
    ),
    Change(
        "metrics.prometheus_port is ignored",
        "telemetry/telemetry.py",
        "if port is not None and self.mesh.rank == 0:",
        "if False:",
        f"{PROMETHEUS}a_run_serves_its_newest_row_on_the_loopback_alone",
    ),
    Change(
        "Prometheus gets the first row for ever",
        "telemetry/prometheus.py",
        "self.values = {**self.values, **{key",
        "self.values = self.values or {**self.values, **{key",
        f"{PROMETHEUS}a_run_serves_its_newest_row_on_the_loopback_alone",
    ),
    Change(
        "pages of other sites read the metrics",
        "telemetry/prometheus.py",
        "if at == LOOPBACK and self",
        "if False and self",
        f"{PROMETHEUS}who_may_ask_for_what",
    ),
    Change(
        "several machines serve metrics on the loopback",
        "telemetry/prometheus.py",
        "return str(probe.getsockname()[0])",
        "return LOOPBACK",
        f"{PROMETHEUS}several_machines_ask_at_the_address_of_the_job",
    ),
    Change(
        "a replaced file is not read again",
        "show/tail.py",
        "if inode != self.inode or size < self.offset:",
        "if size < self.offset:",
        f"{TAIL}new_rows_are_shown_once_also_where_the_file_is_torn_or_replaced",
    ),
    Change(
        "a failure ends a tail although a restart comes",
        "show/tail.py",
        "if self.now() - since >= self.patience:",
        "if True:",
        f"{TAIL}a_failure_counts_once_no_restart_has_come",
    ),
    Change(
        "saves are shown before the rows of their steps",
        "show/tail.py",
        "while rest and step is not None and rest[0][0] <= step:",
        "while False:",
        f"{TAIL}saves_and_starts_stand_between_the_rows_of_their_steps",
    ),
]

NOTEBOOK = f"{CONSOLE}a_notebook_has_one_line_that_is_drawn_anew_without_other_control_characters"
SHOWN = [
    Change(
        "a notebook has no live line",
        "telemetry/log.py",
        "if isinstance(terminal.file, NotebookOutput):",
        "if False:",
        NOTEBOOK,
    ),
    Change(
        "rows are written behind the live line of a notebook",
        "telemetry/log.py",
        "self.stream.write(wiped + text + self.line)",
        "self.stream.write(text)",
        NOTEBOOK,
    ),
    Change(
        "W&B has names of its own",
        "telemetry/metrics.py",
        'self.run.log({"step": step, **scalars})',
        'self.run.log({"step": step, **{f"train/{name}": value for name, value in scalars.items()}})',
        "tests/unit/telemetry/test_wandb_files.py::test_wandb_and_tensorboard_get_the_names_and_numbers_of_the_file",
    ),
]

CHANGES = [*DOCTORS, *NOTICES, *SHOWN]
