"""The files for Kubernetes and SkyPilot: of the schemas' form, and they say what launcher and rendezvous host read.

The schemas hold what these files use of JobSet v1alpha2 and SkyPilot's task YAML; other keys are refused, so that a
misspelt one is found.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose

from moe_lightning.cli.composition import check_config, config_folder
from moe_lightning.cli.train import elastic_options, resolved
from moe_lightning.elastic.etcd import EtcdAccess
from moe_lightning.elastic.launcher import ElasticLauncher
from moe_lightning.elastic.protocol import Address, read_secret
from moe_lightning.elastic.rendezvous_host import RendezvousServer
from moe_lightning.errors import ConfigurationError
from tests.documented import ROOT

jsonschema = pytest.importorskip("jsonschema")

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
COUNT: Schema = {"type": "integer", "minimum": 0}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
FLAG: Schema = {"type": "boolean"}


def things(required: str = "", **properties: Schema) -> Schema:
    """An object of these properties and no others."""
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


def several(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


MOUNT = things("name mountPath", name=NAME, mountPath=TEXT, readOnly=FLAG)
CONTAINER = things(
    "name image command args",
    name=NAME,
    image=TEXT,
    workingDir=TEXT,
    command=several(TEXT),
    args=several(TEXT),
    env=several(
        things(
            "name",
            name={"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
            value=TEXT,
            valueFrom=things("secretKeyRef", secretKeyRef=things("name key", name=NAME, key=TEXT)),
        )
    ),
    ports=several(things("containerPort", name={**NAME, "maxLength": 15}, containerPort=PORT)),
    readinessProbe=things("tcpSocket", tcpSocket=things("port", port=PORT)),
    resources=things(limits={"type": "object", "additionalProperties": {"type": ["integer", "string"]}}),
    volumeMounts=several(MOUNT),
)
VOLUME = things(
    "name",
    name=NAME,
    secret=things("secretName", secretName=NAME, defaultMode={**COUNT, "maximum": 0o777}),
    persistentVolumeClaim=things("claimName", claimName=NAME),
    emptyDir=things(medium=one_of("", "Memory"), sizeLimit=TEXT),
)
POD = things(
    "containers restartPolicy",
    restartPolicy=one_of("Never", "OnFailure"),  # of Jobs
    shareProcessNamespace=FLAG,
    terminationGracePeriodSeconds=COUNT,
    nodeSelector={"type": "object", "additionalProperties": TEXT},
    securityContext=things(runAsNonRoot=FLAG, runAsUser=COUNT, runAsGroup=COUNT, fsGroup=COUNT),
    containers=several(CONTAINER),
    volumes=several(VOLUME),
)
JOB = things(
    "template",
    parallelism=COUNT,
    completions=COUNT,
    completionMode=one_of("Indexed", "NonIndexed"),
    backoffLimit=COUNT,
    template=things("spec", spec=POD),
)
JOBSET = things(
    "apiVersion kind metadata spec",
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=things("name", name=NAME),
    spec=things(
        "replicatedJobs",
        network=things(enableDNSHostnames=FLAG, subdomain=NAME, publishNotReadyAddresses=FLAG),
        startupPolicy=things("startupPolicyOrder", startupPolicyOrder=one_of("AnyOrder", "InOrder")),
        successPolicy=things("operator", operator=one_of("All", "Any"), targetReplicatedJobs=several(NAME)),
        failurePolicy=things(maxRestarts=COUNT),
        replicatedJobs=several(things("name template", name=NAME, replicas=COUNT, template=things("spec", spec=JOB))),
    ),
)
VARIABLES: Schema = {"type": "object", "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"}}
SKYPILOT = things(
    "run resources",
    name=NAME,
    num_nodes={**COUNT, "minimum": 1},
    workdir=TEXT,
    resources=things(
        infra=TEXT,
        accelerators={"type": "string", "pattern": r"^[A-Z0-9-]+:\d+$"},
        use_spot=FLAG,
        disk_size=COUNT,
        job_recovery=things(strategy=one_of("FAILOVER", "EAGER_NEXT_REGION"), max_restarts_on_errors=COUNT),
    ),
    envs=VARIABLES,
    secrets=VARIABLES,
    setup=TEXT,
    run=TEXT,
)


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / "docs" / name).read_text())


def elastic(arguments: list[str]) -> dict[str, Any]:
    """What moe-train would start its ranks with."""
    with config_folder():
        config = resolved(compose("train", ["run_dir=outputs/x", *arguments]))
    check_config({**config, "trainer": {**config["trainer"], "devices": 1}})
    options = elastic_options(config, external=False)
    assert options is not None, "the run is elastic"
    return options


@pytest.fixture
def jobs() -> dict[str, Any]:
    """The pods' specifications by the names of their jobs."""
    jobset = read("jobset.yaml")
    return {job["name"]: job["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]}


@pytest.mark.parametrize(
    ("name", "schema"), [("jobset.yaml", JOBSET), ("jobset-etcd.yaml", JOBSET), ("skypilot.yaml", SKYPILOT)]
)
def test_files_have_the_form(name: str, schema: Schema) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(read(name), schema)


def test_a_misspelt_key_is_found() -> None:
    wrong = read("jobset.yaml")
    wrong["spec"]["succesPolicy"] = wrong["spec"].pop("successPolicy")
    with pytest.raises(jsonschema.ValidationError, match="succesPolicy"):
        jsonschema.validate(wrong, JOBSET)


def test_pods_meet_at_the_rendezvous_host(jobs: dict[str, Any]) -> None:
    jobset = read("jobset.yaml")
    (host,), (node,) = (jobs[name]["template"]["spec"]["containers"] for name in ("rendezvous", "node"))
    options = elastic(node["args"])
    told = dict(zip(host["args"][::2], host["args"][1::2], strict=True))
    bind, rdzv_endpoint = Address.parse(told["--bind"]), Address.parse(options["rdzv_endpoint"])
    name = jobset["metadata"]["name"]
    assert rdzv_endpoint.host == f"{name}-rendezvous-0-0.{name}"
    assert jobset["spec"]["network"]["enableDNSHostnames"]
    ports = {rdzv_endpoint.port, host["ports"][0]["containerPort"], host["readinessProbe"]["tcpSocket"]["port"]}
    assert ports == {bind.port}
    assert options["secret_file"] == told["--secret-file"]
    assert options["num_nodes"] == jobs["node"]["parallelism"] == jobs["node"]["completions"]
    assert f"ranks={node['resources']['limits']['nvidia.com/gpu']}" in node["args"]
    assert jobset["spec"]["successPolicy"]["targetReplicatedJobs"] == ["node"]
    assert jobset["spec"]["replicatedJobs"][0]["name"] == "rendezvous", "started in order"


def test_pods_meet_in_etcd(jobs: dict[str, Any], tmp_path: Path) -> None:
    (job,) = read("jobset-etcd.yaml")["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (node,), with_host = pod["containers"], jobs["node"]["template"]["spec"]
    options = elastic(node["args"])
    ElasticLauncher(num_ranks=8, log_dir=tmp_path, **options).check()
    assert options["settings"].membership == "etcd"
    assert options["num_nodes"] == job["template"]["spec"]["parallelism"] == job["template"]["spec"]["completions"]
    variables = {each["name"]: each for each in node["env"]}
    access = EtcdAccess.parse(options["rdzv_endpoint"], {name: name for name in variables})
    assert (access.user, access.cacert) == tuple(sorted(variables, reverse=True)), "all are read"
    mounts = {mount["mountPath"]: mount["name"] for mount in node["volumeMounts"]}
    folder, _, _ = variables["ETCDCTL_CACERT"]["value"].rpartition("/")
    (volume,) = (each for each in pod["volumes"] if each["name"] == mounts[folder])
    secret = variables["ETCDCTL_USER"]["valueFrom"]["secretKeyRef"]
    assert volume["secret"]["secretName"] == secret["name"]
    text = (ROOT / "docs" / "jobset-etcd.yaml").read_text()
    assert f"create secret generic {secret['name']} --from-literal={secret['key']}=" in text
    for key in ("restartPolicy", "shareProcessNamespace", "securityContext", "terminationGracePeriodSeconds"):
        assert pod[key] == with_host[key]
    assert set(node) - {"env"} == set(with_host["containers"][0])
    assert f"ranks={node['resources']['limits']['nvidia.com/gpu']}" in node["args"]


@pytest.mark.parametrize(("codes", "expected"), [("0 0", 0), ("0 255", 0), ("255 255", 1)])
def test_machines_of_ssh_meet_in_etcd(codes: str, expected: int, tmp_path: Path) -> None:
    """The script under a program in place of ssh that runs its command here, with one in place of moe-train."""
    where, home = tmp_path / "a folder", tmp_path / "home"
    where.mkdir()
    home.mkdir()
    programs = {
        "ssh": 'while [[ "$1" == -* ]]; do [[ "$1" == -o ]] && shift; shift; done; export NODE="$1"; eval "$2"',
        "moe-train": f'printf "%s\\n" "$PWD" "$@" > "{tmp_path}/$NODE"; codes=({codes}); exit ${{codes[$NODE]}}',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o700)
    (home / ".profile").write_text(f'PATH="{tmp_path}:$PATH"\n')
    urls = "https://a:2379,https://b:2379"
    done = subprocess.run(
        ["bash", str(ROOT / "docs" / "ssh.sh"), "data.source=my corpus/", "run_name=mine"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(home), "NODES": "0 1", "ETCD": urls, "RANKS": "8"},
        cwd=where,
    )
    assert done.returncode == expected
    first, second = ((tmp_path / node).read_text().splitlines() for node in "01")
    assert first == second
    assert (first[0], first[-3:]) == (str(where), ["ranks=8", "data.source=my corpus/", "run_name=mine"])
    options = elastic([each for each in first[1:] if not each.startswith("data.")])
    assert (options["rdzv_endpoint"], options["num_nodes"]) == (urls, 2)
    ElasticLauncher(num_ranks=8, log_dir=tmp_path, **options).check()


@pytest.mark.parametrize(("missing", "expected"), [("NODES", "name the machines"), ("ETCD", "the address of etcd")])
def test_machines_of_ssh_and_etcd_must_be_named(missing: str, expected: str) -> None:
    given = {"PATH": os.environ["PATH"], "NODES": "0 1", "ETCD": "https://a:2379"}
    del given[missing]
    done = subprocess.run(["bash", str(ROOT / "docs" / "ssh.sh")], env=given, capture_output=True, text=True)
    assert done.returncode
    assert len(done.stderr.splitlines()) == 1
    assert expected in done.stderr


def laid_by(user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files belong to a user, and this process to user 1000."""
    fstat = os.fstat

    def owned(descriptor: int) -> os.stat_result:
        found = list(fstat(descriptor))
        found[stat.ST_UID] = user
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", owned)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.mark.parametrize(
    ("user", "mode", "refusal"),
    [
        (0, 0o440, None),
        (0, 0o400, None),
        (0, 0o444, "has mode 444"),
        (0, 0o460, "has mode 460"),
        (0, 0o640, "has mode 640"),
        (1000, 0o440, "has mode 440"),
        (1000, 0o400, None),
        (1001, 0o400, "belongs to another user"),
    ],
)
def test_only_a_secret_that_root_has_laid_may_be_readable_by_a_group(
    user: int, mode: int, refusal: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0" * 64)
    secret.chmod(mode)
    laid_by(user, monkeypatch)
    if refusal is None:
        assert read_secret(secret) == b"0" * 64
    else:
        with pytest.raises(ConfigurationError, match=refusal):
            read_secret(secret)


def test_the_image_has_the_commands_and_the_user_of_the_pods(jobs: dict[str, Any]) -> None:
    """Form of the Dockerfile: known instructions, an existing context, extras that the package has."""
    text = (ROOT / "docs" / "Dockerfile").read_text()
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    instructions = dict(lines)
    assert next(name for name, _ in lines) == "FROM"
    assert set(instructions) <= {"FROM", "RUN", "COPY", "USER", "WORKDIR", "CMD"}
    assert re.fullmatch(r"python:3\.1[123]-slim", instructions["FROM"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    install = next(rest for name, rest in lines if rest.startswith("pip install"))
    extras = re.search(r"\[(.+)\]", install)
    assert set(extras[1].split(",")) <= set(project["optional-dependencies"])
    images = {container["image"] for job in jobs.values() for container in job["template"]["spec"]["containers"]}
    assert all(f"-t {image} ." in text for image in images)
    for job in jobs.values():
        pod = job["template"]["spec"]
        assert str(pod["securityContext"]["runAsUser"]) == instructions["USER"]
        assert pod["shareProcessNamespace"], "moe-train reaps its own workers only"
        assert pod["containers"][0]["command"][0] in {"python", *project["scripts"]}
    assert json.loads(instructions["CMD"])[0] in project["scripts"]


def test_pods_mount_what_is_read(jobs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for job in jobs.values():
        pod = job["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
        assert set(volumes) == {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        mode = mounts["/secret"]["secret"]["defaultMode"]
        assert pod["securityContext"]["fsGroup"], "lets the group read what root has laid"
        secret = tmp_path / "secret"
        secret.unlink(missing_ok=True)
        secret.write_text("0" * 64)
        secret.chmod(mode | 0o040)
        laid_by(0, monkeypatch)
        assert read_secret(secret) == b"0" * 64, "nobody else may read it"
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert pod["containers"][0]["workingDir"] in mounts


def test_pods_get_the_time_to_hand_over(jobs: dict[str, Any]) -> None:
    pod = jobs["node"]["template"]["spec"]
    settings = elastic(pod["containers"][0]["args"])["settings"]
    assert settings.notice_on_sigterm
    assert pod["containers"][0]["command"] == ["moe-train"], "a shell would keep the signal"
    leaving_s = ElasticLauncher.grace_s + settings.silence_timeout_s + settings.hang_timeout_s
    assert pod["terminationGracePeriodSeconds"] >= 2 * leaving_s


@pytest.mark.parametrize("rank", [0, 1])
def test_machines_of_skypilot_meet(rank: int, tmp_path: Path) -> None:
    """The file's own script, with programs in place of python and moe-train that tell what they were called with."""
    task = read("skypilot.yaml")
    for program in ("python", "moe-train"):
        path = tmp_path / "bin" / program
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$@" > {program}.called.new && mv {program}.called.new {program}.called\n'
        )
        path.chmod(0o700)
    secret = "5" * 64
    variables = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "MOE_SECRET": secret,
        "STORE": "s3://bucket/name",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4",
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NUM_GPUS_PER_NODE": task["resources"]["accelerators"].split(":")[1],
    }
    used = set(re.findall(r"\$(?:\{)?([A-Z_]+)", task["run"]))
    assert used <= variables.keys()
    assert set(task["envs"]) | set(task["secrets"]) <= used
    script = task["run"].replace("trap", "wait; trap")  # the host's part is over before the script ends it
    subprocess.run(["bash", "-ec", script.replace('"kill $!"', '"true"')], env=variables, cwd=tmp_path, check=True)
    assert read_secret(tmp_path / "run.secret") == secret.encode()
    options = elastic((tmp_path / "moe-train.called").read_text().splitlines())
    assert options["rdzv_endpoint"] == "10.0.0.1:29510"
    assert options["num_nodes"] == 4
    assert options["settings"].notice_url is not None
    hosted = tmp_path / "python.called"
    assert hosted.exists() == (rank == 0)
    if rank == 0:
        called = hosted.read_text().splitlines()
        assert called[:2] == ["-m", RendezvousServer.__module__]
        assert called[called.index("--bind") + 1] == options["rdzv_endpoint"]
        assert called[called.index("--secret-file") + 1] == options["secret_file"]
