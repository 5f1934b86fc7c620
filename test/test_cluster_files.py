"""docs/cluster/: what people start agents with is read by the programs that will read it, and what
it starts is read by our own parser."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from sgl_pipeline.managers.command_line.server_args import _parse
from sgl_pipeline.managers.hosts.early_options import read_early_options

FILES = Path(__file__).resolve().parents[1] / "docs" / "cluster"
SERVER = ["-m", "sgl_pipeline.launch_server"]
# As LeaderWorkerSet sets them (api/leaderworkerset/v1 of kubernetes-sigs/lws).
GROUP = {"LWS_GROUP_SIZE": "4", "LWS_LEADER_ADDRESS": "head.group.ns"}


def assert_starts(argv: Sequence[str], rank: int, head: str, key_file: str | None) -> None:
    """That is our server on four hosts, by SGLang's parser with our flags and by the agent's."""
    flags = [*argv[argv.index(SERVER[1]) + 1 :]]
    options = _parse(flags)
    early = read_early_options(flags)
    assert early is not None
    assert (options.nnodes, options.node_rank, options.dist_init_addr) == (4, rank, head)
    assert (early.cluster.num_hosts, early.cluster.rank, early.num_stages) == (4, rank, 4)
    assert early.cluster.head_address == head
    assert early.cluster.key_file == key_file
    assert early.model
    assert (options.host, options.port) == ("0.0.0.0", 30000)


def manifests(name: str) -> list[dict[str, Any]]:
    return [*yaml.safe_load_all((FILES / f"{name}.yaml").read_text())]


def manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    group, service = manifests("leaderworkerset")
    return group, service


def test_pods_start_hosts_of_one_pipeline_with_the_key_from_a_secret() -> None:
    template = manifest()[0]["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 4
    for rank, role in ((0, "leaderTemplate"), (3, "workerTemplate")):
        pod = template[role]["spec"]
        (container,) = pod["containers"]
        text = " ".join([*container["command"], *container["args"]])
        for name, value in {**GROUP, "LWS_WORKER_INDEX": str(rank)}.items():
            text = text.replace(f"$({name})", value)
        assert "$(" not in text
        assert_starts(shlex.split(text), rank, "head.group.ns:20000", key_file=None)
        (key,) = container["env"]
        assert key["name"] == "SGL_PIPELINE_CLUSTER_KEY"
        assert set(key["valueFrom"]) == {"secretKeyRef"}
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["cluster"] == 20000
        probe = container["readinessProbe"]
        assert (probe.get("httpGet") or probe["tcpSocket"])["port"] in ports
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_a_pod_that_dies_does_not_take_its_group_along() -> None:
    group, service = manifest()
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["restartPolicy"] == "None"
    labels = template["leaderTemplate"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert not service["spec"]["selector"].items() <= (
        template["workerTemplate"]["metadata"]["labels"].items()
    )


@pytest.mark.parametrize(
    ("name", "variable", "path_to_pod"),
    [
        (
            "leaderworkerset",
            "SGL_PIPELINE_LWS_CRD",
            ("leaderWorkerTemplate", "workerTemplate", "spec"),
        ),
        (
            "kuberay",
            "SGL_PIPELINE_RAY_CRD",
            ("workerGroupSpecs", 0, "template", "spec"),
        ),
    ],
)
def test_the_manifest_is_as_the_published_schema_has_it(
    name: str, variable: str, path_to_pod: tuple[str | int, ...]
) -> None:
    """With an environment variable that names the CustomResourceDefinition of LeaderWorkerSet
    (kubernetes-sigs/lws) or of RayCluster (ray-project/kuberay)."""
    path = os.environ.get(variable)
    if path is None:
        pytest.skip(f"{variable} names no CustomResourceDefinition")
    definition = yaml.load(Path(path).read_text(), yaml.CSafeLoader)
    resource = manifests(name)[0]
    version = resource["apiVersion"].partition("/")[2]
    (found,) = [one for one in definition["spec"]["versions"] if one["name"] == version]
    schema = found["schema"]["openAPIV3Schema"]
    _forbid_unknown(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft7Validator(schema)
    assert [error.message for error in validator.iter_errors(resource)] == []
    pod: Any = resource["spec"]
    for step in path_to_pod:
        pod = pod[step]
    pod["containers"][0]["x"] = 1
    pod["containers"][0]["ports"] = "20000"
    assert len(list(validator.iter_errors(resource))) == 2


def _forbid_unknown(schema: Any) -> None:
    """As the API server, which knows no other fields, and has numbers where strings may be too."""
    if isinstance(schema, dict):
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        if schema.pop("x-kubernetes-int-or-string", False):
            schema.pop("anyOf", None)
            schema["type"] = ["integer", "string"]
    children = schema.values() if isinstance(schema, dict) else schema
    if isinstance(schema, dict | list):
        for child in children:
            _forbid_unknown(child)


def test_the_head_of_a_ray_cluster_has_ray_start_the_others_in_its_pods() -> None:
    cluster, deployment, service = manifests("kuberay")
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    text = " ".join([*container["command"], *container["args"]])
    flags = shlex.split(text.replace("$(POD_IP)", "203.0.113.7"))
    assert_starts(flags, 0, "203.0.113.7:20000", key_file=None)
    early = read_early_options(flags[flags.index(SERVER[1]) + 1 :])
    assert early is not None and early.cluster.use_ray
    variables = {one["name"]: one for one in container["env"]}
    assert variables["POD_IP"]["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    # The service that KubeRay makes for the cluster's head has this name.
    name, head = cluster["metadata"]["name"], cluster["spec"]["headGroupSpec"]
    port = head["rayStartParams"]["ray-client-server-port"]
    assert variables["RAY_ADDRESS"]["value"] == f"ray://{name}-head-svc:{port}"
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    # One agent in a pod, with a pod to spare; none beside Ray's own processes.
    (group,) = cluster["spec"]["workerGroupSpecs"]
    assert group["replicas"] == early.cluster.num_hosts
    assert head["rayStartParams"]["num-cpus"] == "0"
    pins = (FILES.parents[1] / "requirements" / "ray.txt").read_text()
    assert f"\nray=={cluster['spec']['rayVersion']}\n" in pins


@pytest.mark.parametrize("rank", [0, 2])
def test_the_slurm_script_starts_every_task_with_its_rank(tmp_path: Path, rank: int) -> None:
    """With stand-ins for Slurm and Python, which write down how they were called."""
    stand_ins = {
        "scontrol": 'test "$1 $2 $3" = "show hostnames node[1-4]" && printf "node1\\nnode2\\n"',
        "srun": f'while [ "$1" != bash ]; do shift; done; SLURM_PROCID={rank} exec "$@"',
        "python3": f'if [ "$1" = -c ]; then exec {sys.executable} "$@"; fi; echo "called $*"',
    }
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", FILES / "sgl_pipeline.sbatch"],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "SLURM_JOB_NUM_NODES": "4",
            "SLURM_JOB_NODELIST": "node[1-4]",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    key_file = tmp_path / ".sgl_pipeline_cluster.key"
    assert key_file.stat().st_mode & 0o777 == 0o600
    assert len(key_file.read_text().strip()) == 64
    (called,) = [line for line in done.stdout.splitlines() if line.startswith("called")]
    assert_starts(shlex.split(called), rank, "node1:20000", str(key_file))
    assert "HTTP: http://node1:30000" in done.stdout


def test_the_systemd_unit_is_one_and_starts_a_host() -> None:
    path = FILES / "sgl-pipeline.service"
    lines = path.read_text().replace("\\\n", " ").splitlines()
    (command,) = [line for line in lines if line.startswith("ExecStart=")]
    named = dict(line.removeprefix("#   ").split("=") for line in lines if line.startswith("#   "))
    for name, value in {**named, "CREDENTIALS_DIRECTORY": "/run/credentials"}.items():
        command = command.replace(f"${{{name}}}", value)
    assert "$" not in command
    assert_starts(shlex.split(command), 0, "head.example.com:20000", "/run/credentials/cluster.key")
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    done = subprocess.run(
        ["systemd-analyze", "verify", path], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
