"""Changes on the way to clusters: what is read from an environment, scripts and manifests that are written."""

from __future__ import annotations

from tests.mutations.change import Change

READ = "tests/unit/launch/clusters/test_environment.py::test_"
SSH = "tests/unit/launch/clusters/test_ssh_start.py::test_"
FILES = "tests/unit/launch/clusters/test_launch_files.py::test_"

CHANGES = [
    Change(
        "every task of srun is the first machine",
        "launch/clusters/environment.py",
        'options |= {"node_rank": node,',
        'options |= {"node_rank": 0,',
        f"{READ}one_task_on_each_node_is_a_launcher",
    ),
    Change(
        "what srun says counts more than a given option",
        "launch/clusters/environment.py",
        "for name, value in found.options.items() if name not in given}",
        "for name, value in found.options.items()}",
        f"{READ}one_task_on_each_node_is_a_launcher",
    ),
    Change(
        "a shell of srun starts a job",
        "launch/clusters/environment.py",
        'or "SLURM_PTY_PORT" in environment:',
        "or False:",
        f"{READ}what_is_no_task_of_srun_is_left_alone",
    ),
    Change(
        "the number of a pod is that of a rank",
        "launch/clusters/environment.py",
        "environment.pop(name, None)",
        "environment.get(name, None)",
        f"{READ}kubeflow_numbers_machines_and_names_where_they_meet",
    ),
    Change(
        "all starts of a user share one secret",
        "launch/secret.py",
        "hmac.new(key.strip().encode(), job.encode(), hashlib.sha256)",
        'hmac.new(key.strip().encode(), b"", hashlib.sha256)',
        f"{READ}machines_of_one_user_derive_the_secret_of_a_start",
    ),
    Change(
        "the key of a user's jobs can be read by others",
        "launch/secret.py",
        "os.O_EXCL | os.O_CLOEXEC, 0o600)",
        "os.O_EXCL | os.O_CLOEXEC, 0o644)",
        f"{READ}machines_of_one_user_derive_the_secret_of_a_start",
    ),
    Change(
        "a job of SLURM that saves is not requeued",
        "launch/clusters/slurm.py",
        '*(["--requeue"] if job.saves else ["--no-requeue"]),',
        '"--no-requeue",',
        f"{FILES}a_script_says_what_was_asked",
    ),
    Change(
        "the script takes another exit code for the run's own",
        "launch/clusters/job.py",
        "return self.config.checkpoint.preempted_exit_code or PREEMPTED",
        "return PREEMPTED",
        f"{FILES}what_a_config_gives_is_not_given_again",
    ),
    Change(
        "a file with variables is run",
        "launch/clusters/slurm.py",
        '*) export "$line" ;; esac',
        '*) eval "export $line" ;; esac',
        f"{FILES}variables_of_a_file_are_read_and_not_run",
    ),
    Change(
        "a file of somebody else is written over",
        "launch/clusters/job.py",
        'if path.exists() and MARK not in path.read_text(errors="replace"):',
        "if False:",
        f"{FILES}nothing_is_submitted_or_overwritten_unasked",
    ),
    Change(
        "a claim that is named is made again",
        "launch/clusters/kubernetes.py",
        "*([] if claim else [place.disk(storage)])",
        "place.disk(storage)",
        f"{FILES}a_pod_has_config_disk_secret_probes_and_restarts",
    ),
    Change(
        "a name that Kubernetes refuses is written",
        "launch/clusters/kubernetes.py",
        "if not LABEL.fullmatch(job.name):",
        "if False:",
        f"{FILES}what_is_refused",
    ),
    Change(
        "a config that is wrong starts a set of jobs again",
        "launch/clusters/kubernetes.py",
        "USER_ERROR = 2",
        "USER_ERROR = 1",
        f"{FILES}a_pod_has_config_disk_secret_probes_and_restarts",
    ),
    Change(
        "every machine of ssh is the first one",
        "launch/clusters/ssh.py",
        '"--node-rank", str(number)',
        '"--node-rank", "0"',
        f"{FILES}every_machine_has_its_number_and_none_shows_the_secret",
    ),
    Change(
        "a run starts before every machine of ssh has answered",
        "launch/clusters/ssh.py",
        "while not self.signals and not all(",
        "while not self.signals and not any(",
        f"{SSH}nothing_starts_where_a_machine_does_not_answer",
    ),
    Change(
        "a run cannot print once its connection is gone",
        "launch/clusters/ssh.py",
        "trap '' PIPE; cat; cat >/dev/null;",
        "cat;",
        f"{SSH}a_killed_start_leaves_a_run_that_can_still_print",
    ),
    Change(
        "a failed machine of ssh leaves the others waiting",
        "launch/clusters/ssh.py",
        "if failed_at is not None and time.monotonic()",
        "if False and requests.clock()",
        f"{SSH}where_one_machine_fails_the_other_is_asked_to_stop",
    ),
    Change(
        "a signal that SLURM and the launcher send ends a rank at once",
        "run/signals.py",
        "if echoes and requests.clock()",
        "if False and requests.clock()",
        "tests/unit/run/test_stopping.py::test_a_rank_of_a_slurm_job_hears_a_signal_twice_and_stops_once",
    ),
]
