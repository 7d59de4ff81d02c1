"""The SkyPilot task and the PyTorchJob of docs/cluster.md: their schemas, and their lines.

The lines run on this machine as on two, are stopped, and run again.
"""

import re
import shlex
import subprocess
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.commands import LITTLE
from tests.journeys.runs import kill_all, newest_step, wait_for_step
from tests.journeys.test_cluster import ENVIRONMENT, PAGE
from tests.ranks import free_port

SKYPILOT, PYTORCHJOB = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
TRAIN = re.compile(r"gigamask train sam_vit_h .*")
FIELDS = {
    "": {
        "name": str,
        "workdir": str,
        "num_nodes": int,
        "resources": dict,
        "volumes": dict,
        "setup": str,
        "run": str,
    },
    "resources": {"accelerators": str, "use_spot": bool, "job_recovery": dict},
    "resources.job_recovery": {"max_restarts_on_errors": int, "recover_on_exit_codes": list},
}
"""Fields of a task that SkyPilot 0.14 knows, as far as they are used."""
BUSY_S = 150
"""Seconds in which eight processes start, also on a busy machine."""
SCALARS = {"str": str, "int": int, "bool": bool, "object": object}


def test_the_skypilot_task_has_fields_that_skypilot_knows():
    """SkyPilot itself is too large to install for this; where it is, it reads the task."""
    for path, known in FIELDS.items():
        section: Any = SKYPILOT
        for name in path.split(".") if path else ():
            section = section[name]
        assert section.keys() <= known.keys(), path
        assert all(type(value) is known[name] for name, value in section.items()), path
    with suppress(ImportError):
        import sky  # pyrefly: ignore[missing-import]

        assert sky.Task.from_yaml_config(SKYPILOT).num_nodes == SKYPILOT["num_nodes"]


def check_fields(value: Any, kind: str, models: list[ModuleType], path: str) -> None:
    """Check that a value has only fields of an OpenAPI model, and their types.

    Args:
        value: What YAML gives.
        kind: The type's name, as in `openapi_types`.
        models: Modules of the models.
        path: Where the value is, for the error.
    """
    if found := re.fullmatch(r"list\[(.*)\]|dict\(\w+, (.*)\)", kind):
        for name, item in enumerate(value) if found[1] else value.items():
            check_fields(item, found[1] or found[2], models, f"{path}.{name}")
    elif kind in SCALARS:
        assert isinstance(value, SCALARS[kind]), path
    else:
        model = next(getattr(each, kind) for each in models if hasattr(each, kind))
        known = {model.attribute_map[name]: each for name, each in model.openapi_types.items()}
        for name, item in value.items():
            assert name in known, f"{path}.{name}"
            check_fields(item, known[name], models, f"{path}.{name}")


def test_the_pytorchjob_has_the_fields_of_kubeflows_models():
    kubeflow = pytest.importorskip("kubeflow.training.models")
    from kubernetes.client import models

    check_fields(PYTORCHJOB, "KubeflowOrgV1PyTorchJob", [kubeflow, models], "PyTorchJob")
    spec = PYTORCHJOB["spec"]
    wrong = PYTORCHJOB | {"spec": spec | {"minReplicas": 4}}
    with pytest.raises(AssertionError, match=r"spec\.minReplicas"):
        check_fields(wrong, "KubeflowOrgV1PyTorchJob", [kubeflow, models], "PyTorchJob")
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    [container] = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch", "the operator looks for this name"
    assert spec["elasticPolicy"]["maxReplicas"] == worker["replicas"]
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in worker["template"]["spec"]["volumes"]}


def test_all_engines_call_the_line_of_many_machines():
    line = next(line for line in PAGE.splitlines() if line.startswith("    torchrun --nnodes"))
    [container] = PYTORCHJOB["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"][
        "containers"
    ]
    training = TRAIN.search(line)[0]
    assert TRAIN.search(SKYPILOT["run"])[0] == shlex.join(container["args"]) == training
    ours, theirs = (
        re.sub(r"(--\S+) \S+", r"\1", " ".join(TRAIN.sub("", text).split()))
        for text in (line, SKYPILOT["run"].replace("\\\n", "").splitlines()[-1])
    )
    assert ours == theirs, "the same flags of torchrun"


def skypilot(rank: int, port: int, training: str) -> tuple[str, dict[str, str]]:
    """Return the script of one of two machines, and what SkyPilot sets for it."""
    script = TRAIN.sub(lambda _: training, SKYPILOT["run"]).replace(":29500", f":{port}")
    return script.replace("\ntorchrun", "\nexec torchrun"), {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "SKYPILOT_TASK_ID": "sky-1",
    }


def kubeflow(rank: int, port: int, training: str) -> tuple[str, dict[str, str]]:
    """Return the command of one of two pods, and what the operator sets for it."""
    policy = PYTORCHJOB["spec"]["elasticPolicy"]
    [container] = PYTORCHJOB["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"][
        "containers"
    ]
    command = shlex.join(container["command"]).replace("--nproc-per-node 8", "--nproc-per-node 1")
    return f"exec {command} {training}", {
        **{each["name"]: each["value"] for each in container["env"]},
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
        "PET_NNODES": "2:2",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
    }


@pytest.mark.long
@pytest.mark.parametrize("engine", [skypilot, kubeflow])
def test_two_machines_are_stopped_and_go_on(scenes, tmp_path, engine):
    words = f"gigamask train {LITTLE} --save-every 1 --batch-size 4 --micro-batch-size 2"
    words += f" --data {scenes} --out {tmp_path}/run --steps"

    def start(steps: int) -> list[subprocess.Popen]:
        port, started = free_port(), []
        for rank in (0, 1):
            script, variables = engine(rank, port, f"{words} {steps}")
            environment = {
                name: value for name, value in ENVIRONMENT.items() if not name.startswith("TORCH_")
            }
            started.append(
                subprocess.Popen(
                    ["bash", "-c", script],
                    env=environment | variables,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return started

    machines = start(100_000)
    try:
        wait_for_step(tmp_path / "run", 2, BUSY_S)
        for machine in machines:  # as both pods are signaled, or all machines of a cancelled job
            machine.terminate()
        said = [machine.communicate(timeout=BUSY_S)[1] for machine in machines]
        assert all(machine.returncode for machine in machines), said
        saved = newest_step(tmp_path / "run")
        machines = start(saved + 2)
        said = [machine.communicate(timeout=BUSY_S)[1] for machine in machines]
        assert [machine.returncode for machine in machines] == [0, 0], said
    finally:
        for machine in machines:
            kill_all(machine)
    assert newest_step(tmp_path / "run") == saved + 2
