"""`shardline launch k8s`: manifests of a TrainJob, a PyTorchJob or a JobSet, and of what they need.

    ConfigMap                the resolved config, as /etc/shardline/run.toml
    PersistentVolumeClaim    the disk that all machines share, where no claim is named
    TrainingRuntime, TrainJob  |  PyTorchJob  |  JobSet

One pod is a machine: its launcher starts the ranks, and reads from PET_* how machines meet (environment.py). The secret
of the job is a Secret of the cluster and stands in no file.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from shardline.config.schema import Config
from shardline.config.write import to_toml
from shardline.errors import UserError
from shardline.launch.clusters.environment import PORT
from shardline.launch.clusters.job import ClusterJob, check_env_file, make_job, write_file
from shardline.launch.secret import VARIABLE

Manifest = dict[str, Any]
CONFIG = "/etc/shardline"
SUBMIT_SECONDS = 120
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
SILENT_MINUTES = 20  # longer than machines wait for each other
USER_ERROR = 2
LABEL = re.compile(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?")  # names of pods are longer, and have 63 characters at most


def command(
    config: Config,
    file: str | None,
    flags: list[str],
    words: tuple[str, ...],
    *,
    image: str,
    kind: str,
    nodes: int,
    gpus_per_node: int | None,
    nproc: int | None,
    claim: str,
    storage: str,
    mount: str,
    namespace: str,
    job_name: str,
    max_restarts: int,
    restarts: int,
    env_file: str,
    out: str,
    dry_run: bool,
    submit: bool,
) -> int:
    """Write the manifests, print them, or give them to kubectl."""
    if dry_run and submit:
        raise UserError("--dry-run prints the manifests and --submit submits them: use only one of them")
    if not image:
        raise UserError("--image is missing: the image that has shardline, such as registry.example.org/shardline:1")
    job = make_job(
        config, file, flags, words,
        name=job_name, nodes=nodes, nproc=nproc, gpus_per_node=gpus_per_node, max_restarts=max_restarts,
    )  # fmt: skip
    if not LABEL.fullmatch(job.name):
        raise UserError(
            f"--job-name {job.name}: Kubernetes takes lowercase letters, digits and dashes, a letter first,"
            " and pods need names of at most 40 characters"
        )
    if env_file:
        check_env_file(env_file)
    place = PodPlan(job, image, gpus_per_node, claim or f"{job.name}-disk", mount.rstrip("/"), bool(env_file))
    found = [place.config_map(), *([] if claim else [place.disk(storage)]), *place.of_kind(kind, restarts)]
    for manifest in found:
        manifest["metadata"]["namespace"] = namespace
    parts = [yaml.safe_dump(json.loads(json.dumps(manifest)), sort_keys=False, width=120) for manifest in found]
    text = job.head("k8s") + "\n" + "---\n".join(parts)
    if dry_run:
        print(text, end="")
        return 0
    path = Path(out or f"{job.name}.yaml")
    write_file(path, text)
    known = [f"--namespace={namespace}", "create", "secret", "generic"]
    if submit:
        _submit(path, job, known, env_file)
        return 0
    print(f"{path} is written; nothing is submitted. To submit it:")
    secret = shlex.join(["kubectl", *known, f"{job.name}-secret", f"--from-file={VARIABLE}=/dev/stdin"])
    print(f"  openssl rand -hex 32 | {secret}")
    if env_file:
        print("  " + shlex.join(["kubectl", *known, f"{job.name}-env", f"--from-env-file={env_file}"]))
    print(f"  kubectl apply -f {shlex.quote(str(path))}")
    return 0


class PodPlan:
    """A job in a cluster: its image, its disk, and the parts of its manifests."""

    def __init__(
        self, job: ClusterJob, image: str, gpus: int | None, claim: str, mount: str, has_variables: bool
    ) -> None:
        self.job, self.image, self.gpus, self.claim, self.mount = job, image, gpus, claim, mount
        self.has_variables, self.folder = has_variables, job.config.job.dump_folder or f"{mount}/{job.name}"

    def of_kind(self, kind: str, restarts: int) -> list[Manifest]:
        if kind == "trainjob":
            return self.train_job(restarts)
        return [self.py_torch_job(restarts) if kind == "pytorchjob" else self.job_set(restarts)]

    def config_map(self) -> Manifest:
        text = to_toml(self.job.config)
        return {**_head("v1", "ConfigMap", f"{self.job.name}-config"), "data": {"run.toml": text}}

    def disk(self, size: str) -> Manifest:
        spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": size}}}
        return {**_head("v1", "PersistentVolumeClaim", self.claim), "spec": spec}

    def train_job(self, restarts: int) -> list[Manifest]:
        """A runtime with what a TrainJob cannot say (disk, probes, restarts), and the TrainJob that runs on it."""
        name = self.job.name
        runtime = _head("trainer.kubeflow.org/v1alpha1", "TrainingRuntime", name)
        label = {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}}
        spec = self._job_set_spec(restarts, self.container("node"))
        spec["replicatedJobs"][0]["template"] |= label
        del spec["replicatedJobs"][0]["replicas"], spec["replicatedJobs"][0]["template"]["spec"]["parallelism"]
        del spec["replicatedJobs"][0]["template"]["spec"]["completions"]  # the TrainJob's numNodes
        runtime["spec"] = {"mlPolicy": {"numNodes": self.job.nodes, "torch": {}}, "template": {"spec": spec}}
        reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}
        trainer = {
            "image": self.image,
            "command": self.words(),
            "numNodes": self.job.nodes,
            "numProcPerNode": self.job.nproc,
            "resourcesPerNode": self.resources(),
        }
        train_job = _head("trainer.kubeflow.org/v1alpha1", "TrainJob", name)
        return [runtime, {**train_job, "spec": {"runtimeRef": reference, "trainer": trainer}}]

    def job_set(self, restarts: int) -> Manifest:
        # Pods of a JobSet are called SET-JOB-INDEX-INDEX, in a subdomain named after the set.
        variables = [
            *_variables(PET_NNODES=self.job.nodes, PET_NPROC_PER_NODE=self.job.nproc, PET_MASTER_PORT=PORT),
            *_variables(PET_MASTER_ADDR=f"{self.job.name}-node-0-0.{self.job.name}"),
            {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}},
        ]
        head = _head("jobset.x-k8s.io/v1alpha2", "JobSet", self.job.name)
        return {**head, "spec": self._job_set_spec(restarts, self.container("node", variables))}

    def py_torch_job(self, restarts: int) -> Manifest:
        variables = _variables(PET_NNODES=self.job.nodes)
        ports = [{"name": "pytorchjob-port", "containerPort": PORT}]
        pod = self.pod({**self.container("pytorch", variables), "ports": ports}, policy=None)
        replica = {"replicas": 1, "restartPolicy": "OnFailure", "template": {"spec": pod}}
        workers = {"Worker": {**replica, "replicas": self.job.nodes - 1}} if self.job.nodes > 1 else {}
        spec = {
            "nprocPerNode": str(self.job.nproc),
            "runPolicy": {"backoffLimit": restarts, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": {"Master": replica, **workers},
        }
        return {**_head("kubeflow.org/v1", "PyTorchJob", self.job.name), "spec": spec}

    def _job_set_spec(self, restarts: int, container: Manifest) -> Manifest:
        """All pods start again when one fails, unless it says that the config or a file must be fixed."""
        wrong = {"containerName": container["name"], "operator": "In", "values": [USER_ERROR]}
        job = {
            "backoffLimit": 0,
            "completionMode": "Indexed",
            "parallelism": self.job.nodes,
            "completions": self.job.nodes,
            "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": wrong}]},
            "template": {"spec": self.pod(container)},
        }
        final = {"name": "config", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
        return {
            "failurePolicy": {"maxRestarts": restarts, "rules": [final]},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
        }

    def pod(self, container: Manifest, policy: str | None = "Never") -> Manifest:
        comm, saves = self.job.config.comm, self.job.config.checkpoint
        volumes = [
            {"name": "config", "configMap": {"name": f"{self.job.name}-config"}},
            {"name": "disk", "persistentVolumeClaim": {"claimName": self.claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ]
        return {
            **({"restartPolicy": policy} if policy else {}),
            # From SIGTERM to SIGKILL: the step under way, and a save.
            "terminationGracePeriodSeconds": int(comm.stop_timeout_seconds + saves.save_timeout_seconds),
            "containers": [container],
            "volumes": volumes,
        }

    def container(self, name: str, variables: list[Manifest] | None = None) -> Manifest:
        secret = {"secretKeyRef": {"name": f"{self.job.name}-secret", "key": VARIABLE}}
        beats = f'test -n "$(find {shlex.quote(self.folder)}/log/lock -mmin -{SILENT_MINUTES})"'
        probe = {"exec": {"command": ["sh", "-c", beats]}, "periodSeconds": 60, "timeoutSeconds": 30}
        places = {"config": CONFIG, "disk": self.mount, "memory": "/dev/shm"}
        return {
            "name": name,
            "image": self.image,
            "command": self.words(),
            "workingDir": self.mount,
            "env": [*(variables or []), {"name": VARIABLE, "valueFrom": secret}],
            **({"envFrom": [{"secretRef": {"name": f"{self.job.name}-env"}}]} if self.has_variables else {}),
            "resources": self.resources(),
            # The run's lock is touched every 3 s; before the first touch, images are fetched and machines meet.
            "startupProbe": {**probe, "failureThreshold": 2 * SILENT_MINUTES},
            "livenessProbe": {**probe, "failureThreshold": 3},
            "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in places.items()],
        }

    def words(self) -> list[str]:
        added = self.job.needed_flags(self.folder)
        return ["shardline", "train", f"{CONFIG}/run.toml", *added, *self.job.options()]

    def resources(self) -> Manifest:
        return {"limits": {"nvidia.com/gpu": str(self.gpus)}} if self.gpus else {}


def _head(version: str, kind: str, name: str) -> Manifest:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}}


def _variables(**values: object) -> list[Manifest]:
    return [{"name": name, "value": str(value)} for name, value in values.items()]


def _submit(path: Path, job: ClusterJob, known: list[str], env_file: str) -> None:
    if shutil.which("kubectl") is None:
        raise UserError(f"--submit: this machine has no kubectl; {path} is written")
    # Through stdin: the arguments of a process can be read by everybody on this machine.
    _kubectl([*known, f"{job.name}-secret", f"--from-file={VARIABLE}=/dev/stdin"], secrets.token_hex(32))
    if env_file:
        _kubectl([*known, f"{job.name}-env", f"--from-env-file={env_file}"])
    print(_kubectl(["apply", "-f", str(path)]), end="")


def _kubectl(words: list[str], given: str = "") -> str:
    done = subprocess.run(["kubectl", *words], input=given, capture_output=True, text=True, timeout=SUBMIT_SECONDS)
    if done.returncode and "AlreadyExists" not in done.stderr:
        raise UserError(f"kubectl {' '.join(words[:5])} ... refuses: {done.stderr.strip()}")
    return done.stdout
