"""Scripts and manifests of `shardline launch`: what stands in them, by their published schemas, and what is refused."""

import copy
import os
import subprocess
import tomllib

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubeflow.training import models as training_operator
from kubeflow_trainer_api import models as trainer

from shardline.cli.main import main
from shardline.config.load import load_config

FLAGS = ["--training.seq_len=64", "--training.steps=7"]
LAUNCH_K8S = ["launch", "k8s", "--image=registry.example.org/shardline:1", "--nodes=2", "--gpus-per-node=8"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "My_run.toml").write_text("[training]\nlocal_batch_size = 2\n")
    return tmp_path


def printed(capsys, *words):
    assert main([*words, "--dry-run"]) == 0
    return capsys.readouterr().out


# ---- SLURM -----------------------------------------------------------------------------------------------------------


def slurm(capsys, *words):
    return printed(capsys, "launch", "slurm", "My_run.toml", *FLAGS, *words)


def test_a_script_says_what_was_asked(capsys, place):
    text = slurm(
        capsys,
        *("--nodes=4", "--gpus-per-node=8", "--time=24:00:00", "--partition=p", "--account=a", "--qos=q"),
        *("--sbatch=--constraint=h100 --mail-type=FAIL", "--max-restarts=3"),
    )
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert directives == [
        *("--job-name=my-run", "--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--time=24:00:00"),
        *("--partition=p", "--account=a", "--qos=q", "--exclusive", "--mem=0", "--constraint=h100"),
        *("--mail-type=FAIL", "--requeue", "--open-mode=append", "--output=%x-%j.out", f"--chdir={place}"),
    ]
    assert " train My_run.toml --training.seq_len=64 --training.steps=7 " in text
    assert '"--job.dump_folder=outputs/my-run-$SLURM_JOB_ID" --checkpoint.enable' in text
    assert "--nproc=8 --max-restarts=3 &" in text
    assert "rdzv" not in text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_what_a_config_gives_is_not_given_again(capsys):
    text = slurm(capsys, "--job.dump_folder=d", "--checkpoint.enable", "--checkpoint.preempted_exit_code=75")
    assert "SLURM_JOB_ID --" not in text
    assert text.count("--checkpoint.enable") == 2  # in the head, and as it was given
    assert '[ "$code" -eq 75 ]' in text
    off = slurm(capsys, "--checkpoint.no_enable")
    assert "--no-requeue" in off
    assert "scontrol requeue" not in off


def test_cores_of_a_part_of_a_machine(capsys):
    text = slurm(capsys, "--cpus-per-task=12")
    assert "#SBATCH --cpus-per-task=12" in text
    assert "srun --kill-on-bad-exit=0 --cpu-bind=none --cpus-per-task=12" in text
    assert "--exclusive" not in text


def test_containers(capsys, place):
    text = slurm(capsys, "--container=a.sif", "--mounts=/data:/data", "--gpus-per-node=2")
    assert f"apptainer exec --nv --bind={place},/data:/data --pwd={place} a.sif \\\n    shardline train" in text
    text = slurm(capsys, "--container=registry#shardline:1", "--mounts=/data:/data")
    assert f"--container-mounts={place}:{place},/data:/data --container-workdir={place} \\\n    shardline train" in text


def test_variables_of_a_file_are_read_and_not_run(capsys, place):
    (place / "some.env").write_text("# ours\nPLAIN=a b\n\nTRICKY=$(touch run)`touch run`\n")
    text = slurm(capsys, "--env-file=some.env")
    part = text[text.index("while IFS=") : text.index("# The machines of one start")]
    shown = subprocess.run(["bash", "-c", part + 'echo "$PLAIN|$TRICKY"'], capture_output=True, text=True)
    assert shown.stdout == "a b|$(touch run)`touch run`\n"
    assert not (place / "run").exists()
    assert "a b" not in text


def test_nothing_is_submitted_or_overwritten_unasked(capsys, place, monkeypatch):
    monkeypatch.setattr("subprocess.run", lambda *words, **options: pytest.fail("something was started"))
    assert main(["launch", "slurm", "My_run.toml"]) == 0
    assert "my-run.sbatch is written; nothing is submitted" in capsys.readouterr().out
    assert main(["launch", "slurm", "My_run.toml", "--nodes=2"]) == 0  # its own file it writes again
    (place / "mine.sbatch").write_text("#!/bin/bash\n")
    assert main(["launch", "slurm", "My_run.toml", "--out=mine.sbatch"]) == 2
    assert (place / "mine.sbatch").read_text() == "#!/bin/bash\n"
    assert "mine.sbatch was not written by `shardline launch`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slurm", "--dry-run", "--submit"], "use only one of them"),
        (["slurm", "--mounts=/a:/b"], "--mounts is for --container"),
        (["slurm", "--env-file=none"], "--env-file none cannot be read"),
        (["slurm", "--env-file=bad.env"], "--env-file bad.env, line 2: expected NAME=VALUE"),
        (["slurm", "--nodes=3", "--parallelism.tensor_parallel_degree=2"], "does not match 3 ranks"),
        (["slurm", "--submit"], "--submit: this machine has no sbatch"),
        (["slurm", "--job-name=a/b"], "--job-name 'a/b': expected letters, digits, dots, dashes and underscores"),
        (["k8s"], "--image is missing"),
        (["k8s", "--image=i", "--job-name=My_run"], "--job-name My_run: Kubernetes takes lowercase letters"),
        (["k8s", "--image=i", "--job-name=" + 41 * "a"], "at most 40 characters"),
        (["k8s", "--image=i", "--kind=pod"], "--kind: expected one of trainjob, pytorchjob, jobset"),
        (["k8s", "--image=i", "--submit"], "--submit: this machine has no kubectl"),
        (["ssh"], "--hosts is missing"),
        (["ssh", "--hosts=a,a"], "names a machine twice"),
        (["ssh", "--hosts=a", "--ssh=no-such-command"], "there is no command 'no-such-command'"),
        (["pbs"], "there is no command 'pbs'"),
    ],
)
def test_what_is_refused(words, said, place, capsys, monkeypatch):
    (place / "bad.env").write_text("A=1\npassword of mine\n")
    monkeypatch.setenv("PATH", str(place))
    assert main(["launch", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "password" not in error


# ---- Kubernetes ------------------------------------------------------------------------------------------------------


def k8s(capsys, *words):
    text = printed(capsys, *LAUNCH_K8S, "My_run.toml", *FLAGS, *words)
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(text)}


def closed(model):
    """The JSON schema of a custom resource, in which fields that it does not have are refused, as a server does."""
    schema = model.model_json_schema(by_alias=True)
    for one in (schema, *schema["$defs"].values()):
        if "one_of_schemas" in one.get("properties", {}):  # how the package holds a quantity, or a name or number
            one.clear()
            one["type"] = ["string", "number"]
        elif "properties" in one:
            one["additionalProperties"] = False
    # What the definitions say besides, and these models leave out.
    schema["properties"]["metadata"] = {"properties": {"name": {"pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"}}}
    rule = schema["$defs"].get("JobsetV1alpha2FailurePolicyRule", {"properties": {}})["properties"]
    rule["action"] = {"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]}
    rule["name"] = {"pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"}
    return schema


def check(manifest):
    kind = manifest["kind"]
    if kind in ("TrainJob", "TrainingRuntime"):
        jsonschema.validate(manifest, closed(getattr(trainer, f"TrainerV1alpha1{kind}")))
    elif kind == "JobSet":
        jsonschema.validate(manifest, closed(trainer.JobsetV1alpha2JobSet))
    elif kind == "PyTorchJob":
        check_operator(manifest["spec"], "KubeflowOrgV1PyTorchJobSpec")
    else:
        kubernetes_validate.validate(manifest, "1.32", strict=True)


def check_operator(content, name):
    """A part of a PyTorchJob has only fields of its model, and pods are those of Kubernetes."""
    model = getattr(training_operator, name)
    known = {field: model.openapi_types[key] for key, field in model.attribute_map.items()}
    for field, value in content.items():
        assert field in known, f"{name} has no field {field}"
        if field == "template":
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": value["spec"]}
            kubernetes_validate.validate(pod, "1.32", strict=True)
        elif known[field].startswith("dict(str, KubeflowOrg"):
            for part in value.values():
                check_operator(part, known[field].split(", ")[1].rstrip(")"))
        elif known[field].startswith("KubeflowOrg"):
            check_operator(value, known[field])
        else:
            assert isinstance(value, {"int": int, "str": str, "bool": bool}[known[field]]), (field, value)


def jobs_of(manifest):
    spec = manifest["spec"]
    spec = spec["template"]["spec"] if manifest["kind"] == "TrainingRuntime" else spec
    return [one["template"] for one in spec["replicatedJobs"]]


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("trainjob", ["ConfigMap", "PersistentVolumeClaim", "TrainingRuntime", "TrainJob"]),
        ("pytorchjob", ["ConfigMap", "PersistentVolumeClaim", "PyTorchJob"]),
        ("jobset", ["ConfigMap", "PersistentVolumeClaim", "JobSet"]),
    ],
)
def test_manifests_fit_the_published_schemas(capsys, kind, found):
    manifests = k8s(capsys, f"--kind={kind}", "--max-restarts=2")
    assert list(manifests) == found
    for manifest in manifests.values():
        check(manifest)
    for manifest in (manifests[name] for name in ("TrainingRuntime", "JobSet") if name in manifests):
        for job in jobs_of(manifest):  # a Job of Kubernetes itself, by its own schema
            head = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "one"}}
            kubernetes_validate.validate({**head, "spec": job["spec"]}, "1.32", strict=True)
    wrong = copy.deepcopy(list(manifests.values())[-1])
    wrong["spec"]["nodes"] = 2
    with pytest.raises((jsonschema.ValidationError, AssertionError)):
        check(wrong)
    for manifest in (manifests[name] for name in ("TrainingRuntime", "JobSet") if name in manifests):
        wrong = copy.deepcopy(manifest)
        spec = wrong["spec"] if wrong["kind"] == "JobSet" else wrong["spec"]["template"]["spec"]
        spec["failurePolicy"]["rules"][0]["action"] = "Stop"
        with pytest.raises(jsonschema.ValidationError, match="'Stop' is not one of"):
            check(wrong)


def test_a_pod_has_config_disk_secret_probes_and_restarts(capsys, place):
    (place / "some.env").write_text("A=1\n")
    found = k8s(capsys, "--kind=jobset", "--claim=mine", "--restarts=4", "--env-file=some.env", "--namespace=team")
    assert "PersistentVolumeClaim" not in found
    assert {manifest["metadata"]["namespace"] for manifest in found.values()} == {"team"}
    (place / "again.toml").write_text(found["ConfigMap"]["data"]["run.toml"])
    assert load_config("again.toml").training == load_config("My_run.toml", FLAGS).training
    assert tomllib.loads((place / "again.toml").read_text())["training"]["steps"] == 7
    spec = found["JobSet"]["spec"]
    assert spec["failurePolicy"]["maxRestarts"] == 4
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (2, 2, 0)
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2]
    pod = job["template"]["spec"]
    assert [volume.get("persistentVolumeClaim") for volume in pod["volumes"]][1] == {"claimName": "mine"}
    container = pod["containers"][0]
    assert container["command"] == [
        *("shardline", "train", "/etc/shardline/run.toml", "--job.dump_folder=/shared/my-run"),
        *("--checkpoint.enable", "--checkpoint.preempted_exit_code=99", "--nproc=8"),
    ]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert variables["PET_MASTER_ADDR"] == "my-run-node-0-0.my-run"
    assert variables["PET_NNODES"] == "2"
    assert "PET_NODE_RANK" in variables
    assert variables["SHARDLINE_JOB_SECRET"] is None  # a reference
    assert container["envFrom"] == [{"secretRef": {"name": "my-run-env"}}]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}


def test_a_pod_has_time_to_save_memory_for_nccl_and_a_disk_of_the_given_size(capsys):
    times = ("--comm.stop_timeout_seconds=40", "--checkpoint.save_timeout_seconds=200")
    found = k8s(capsys, "--kind=jobset", "--storage=7Gi", "--mount=/data", *times)
    assert found["PersistentVolumeClaim"]["spec"]["resources"]["requests"]["storage"] == "7Gi"
    pod = found["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 240
    (container,), volumes = pod["containers"], {volume.pop("name"): volume for volume in pod["volumes"]}
    places = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
    assert places == {
        "/etc/shardline": {"configMap": {"name": "my-run-config"}},
        "/data": {"persistentVolumeClaim": {"claimName": "my-run-disk"}},
        "/dev/shm": {"emptyDir": {"medium": "Memory"}},
    }


def test_a_pytorch_job_has_a_master_and_as_many_workers_as_are_left(capsys):
    spec = k8s(capsys, "--kind=pytorchjob", "--restarts=5", "--nodes=4")["PyTorchJob"]["spec"]
    assert (spec["nprocPerNode"], spec["runPolicy"]["backoffLimit"]) == ("8", 5)
    replicas = spec["pytorchReplicaSpecs"]
    assert {role: one["replicas"] for role, one in replicas.items()} == {"Master": 1, "Worker": 3}
    (container,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert {one["name"]: one.get("value") for one in container["env"]}["PET_NNODES"] == "4"


def test_the_probe_sees_a_lock_that_is_touched(capsys, place):
    found = k8s(capsys, "--kind=jobset", f"--mount={place}")
    container = found["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    for probe in ("startupProbe", "livenessProbe"):
        command = container[probe]["exec"]["command"]
        assert subprocess.run(command, capture_output=True).returncode != 0  # nothing has begun
        lock = place / "my-run" / "log" / "lock"
        lock.parent.mkdir(parents=True)
        lock.write_text("")
        assert subprocess.run(command).returncode == 0
        os.utime(lock, (1, 1))
        assert subprocess.run(command).returncode == 1
        lock.unlink()
        lock.parent.rmdir()
        lock.parent.parent.rmdir()


def test_a_train_job_names_its_runtime(capsys):
    found = k8s(capsys)
    assert found["TrainJob"]["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",
        "name": found["TrainingRuntime"]["metadata"]["name"],
    }
    assert found["TrainJob"]["spec"]["trainer"]["numNodes"] == 2
    assert found["TrainJob"]["spec"]["trainer"]["numProcPerNode"] == 8


def test_the_commands_to_submit_are_printed(capsys, place):
    (place / "some.env").write_text("A=1\n")
    assert main([*LAUNCH_K8S, "My_run.toml", "--env-file=some.env"]) == 0
    shown = capsys.readouterr().out
    secret = "create secret generic my-run-secret --from-file=SHARDLINE_JOB_SECRET=/dev/stdin"
    assert f"openssl rand -hex 32 | kubectl --namespace=default {secret}" in shown
    assert "create secret generic my-run-env --from-env-file=some.env" in shown
    assert "kubectl apply -f my-run.yaml" in shown
    assert (place / "my-run.yaml").exists()


# ---- ssh -------------------------------------------------------------------------------------------------------------


def test_every_machine_has_its_number_and_none_shows_the_secret(capsys, place):
    text = printed(capsys, "launch", "ssh", "My_run.toml", "--hosts=me@a,me@b", "--nproc=2", "--port=7000", *FLAGS)
    for number, name in enumerate("ab"):
        assert f"ssh -o BatchMode=yes -o ServerAliveInterval=15 me@{name} <<" in text
        assert f"--nproc=2 --nnodes 2 --node-rank {number} --rdzv-endpoint a:7000 <" in text
    assert f"cd {place} || exit 2" in text
    assert "SHARDLINE_JOB_SECRET=" not in text
