"""`moe-sim` as a user runs it, in this process; the recipe that it writes is one that moe-train accepts."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest
import yaml
from hydra import compose
from omegaconf import OmegaConf

from moe_lightning.cli.composition import CONFIG_DIR, check_arguments, config_folder
from moe_lightning.cli.sim import main
from moe_lightning.cli.simulation import HEAD, overview
from moe_lightning.simulate.failures import Failures
from moe_lightning.simulate.hardware import Hardware
from moe_lightning.simulate.mesh import MeshSpec
from moe_lightning.simulate.policy import POLICIES, Policy
from moe_lightning.simulate.recommend import Advice
from moe_lightning.simulate.scenario import Report
from tests.unit.simulated import scenario, small_hardware

UNTIED = ["model.tie_embeddings=false"]
FAST = ["model=moe_gpt_s", "nodes=8", "hours=0.5", "failures.node_mtbf_hours=1"]
FASTER = [*FAST, "hours=0.1", "failures.node_mtbf_hours=0.2"]
"""As many failures in less time."""


def test_policies_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FAST, "compare=[ds,lazarus]"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[-4:]] == ["policy", "ours", "ds", "lazarus"]


def test_same_seed_same_output(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for seed in (3, 3, 4):
        assert main([*FAST, f"seed={seed}"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


def test_only_a_recipe_of_moe_sim_is_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipes" / "mine.yaml"
    path.parent.mkdir()
    path.write_text(f"{HEAD}moe-sim.\n")
    assert main(["recommend", *FASTER, f"recipe={path}"]) == 0
    path.write_text("# @package _global_\ntrainer:\n  max_steps: 7\n")
    assert main(["recommend", *FAST, f"recipe={path}"]) == 2
    assert "exists and was not recommended: name another file" in capsys.readouterr().err
    assert "max_steps: 7" in path.read_text()


@pytest.mark.parametrize(
    ("model", "whole", "active"),
    [
        ("qwen3_30b_a3b", "30.1B", "2.9B"),
        ("mixtral_8x7b", "46.7B", "12.9B"),
        ("gpt_oss_20b", "20.8B", "4.03B"),
        ("gpt_oss_120b", "117B", "5.47B"),
    ],
)
def test_published_models_are_known_by_name(
    model: str, whole: str, active: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = ["nodes=4", "hardware.preset=h200", "hardware.ranks_per_node=8", "hours=0.1", "failures.kind=none"]
    assert main([f"model={model}", *cluster]) == 0
    printed = capsys.readouterr().out
    assert f"{whole} parameters, {active} active for a token" in printed
    assert re.search(r"speed +[\d,]+ tokens/s, MFU \d+\.\d%, [\d,.]+ days for 10\^12 tokens", printed)
    assert "none assumed: failures.kind=exponential has some" in printed


def test_assumed_failures_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FAST, "failures.kind=exponential", "failures.node_mtbf_hours=80", "nodes=8"]) == 0
    assert "a node fails every 80 h on average (exponential), one of the 8 every 10 h;" in capsys.readouterr().out
    three = [*FAST, "nodes=8", "failures.simultaneous=3"]
    assert main([*three, "failures.kind=periodic", "failures.period_s=300"]) == 0
    assert "assumed: 3 nodes every 300 s" in capsys.readouterr().out
    assert main([*three, "failures.kind=exponential", "failures.node_mtbf_hours=80"]) == 0
    assert "one of the 8 every 10 h, each time with 2 more;" in capsys.readouterr().out


def test_mfu_is_that_of_nodes_with_their_speeds() -> None:
    report = Report(**{f.name: 0 for f in fields(Report) if f.default is MISSING} | {"duration_s": 1.0, "samples": 500})
    whole, slower = (
        float(
            re.findall(
                r"MFU ([\d.]+)%", overview(scenario(hardware=machine), report, {"kind": "none", "simultaneous": 1})
            )[0]
        )
        for machine in (small_hardware(), small_hardware(speeds=[1.0, 0.5]))
    )
    assert slower == pytest.approx(whole / 0.75, rel=0.02)


def test_lost_tokens_are_weighed_against_lossless_windows(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(**{f.name: 0 for f in fields(Report) if f.default is MISSING} | {"duration_s": 1.0})
    lossy, lossless = replace(report, samples=1050, plt=0.008), replace(report, samples=1000)
    advice = Advice(scenario=scenario(), policy=POLICIES["ours"], report=lossy, choices=(), lossless=lossless)
    assert "lost tokens  0.8 %, for 5 % more samples than with lossless windows" in advice.table()
    assert "lost tokens" not in replace(advice, lossless=None).table()


@pytest.mark.slow
def test_a_recipe_without_a_name_goes_beside_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout has a folder recipes of its own."""
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["recommend", *FAST]) == 0
    assert list((tmp_path / "recipes").iterdir()) == []
    assert (tmp_path / "outputs/moe-sim/recipes/recommended.yaml").is_file()


@pytest.mark.parametrize("extra", [[], ["global_batch=64", "rank_batch=null", "policy.min_replicas=1"]])
def test_moe_train_accepts_what_is_recommended(
    extra: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipes" / "advised.yaml"
    assert main(["recommend", *FASTER, *extra, f"recipe={path}"]) == 0
    assert path.read_text().startswith(HEAD)
    printed = capsys.readouterr().out
    assert "choice" in printed
    assert "goodput" in printed
    with config_folder():
        overrides = [f"hydra.searchpath=[file://{tmp_path}]", "recipes=advised", "run_name=x", f"run_dir={tmp_path}"]
        composed = compose("train", overrides, return_hydra_config=True)
    del composed.hydra
    config = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(config, dict)
    config["trainer"]["devices"] = 1
    check_arguments(config)
    assert config["model"]["d_model"] == 512
    assert config["strategy"]["slots"] >= 1
    callbacks = config["callbacks"]
    assert {"partial_experts_checkpoint", "load_balancer", "fault_recovery", "telemetry"} <= set(callbacks)
    saving = callbacks["partial_experts_checkpoint"]
    assert saving["lossless"] or saving["k_persist"] <= saving["k_snapshot"]
    assert config["data"]["global_batch_size"] == (64 if extra else 32)


def test_a_rule_of_one_node_is_recommended_with_one_replica(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The balancer refuses to promise more."""
    path = tmp_path / "recipes" / "advised.yaml"
    given = ["policy.placement=compact", "policy.slots=2", "policy.rebalance_every=100", f"recipe={path}"]
    assert main(["recommend", *FAST, *given]) == 0
    callbacks = yaml.safe_load(path.read_text())["callbacks"]
    assert callbacks["load_balancer"]["placement_rule"] == "compact"
    assert callbacks["load_balancer"]["min_replicas"] == callbacks["fault_recovery"]["min_replicas"] == 1
    assert main(["recommend", *FAST, *given, "policy.min_replicas=2"]) == 2
    assert "policy.placement=compact leaves experts on one node" in capsys.readouterr().err


def test_a_mesh_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FAST, *UNTIED, "mesh.pp=2", "mesh.dense=hsdp"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
    assert lines["mesh"] == "pp=2 dp=4 cp=1 tp=1 dense=hsdp, 8 micro-batches"
    assert lines["bubbles"] == "11.1 % of a rank's passes"


@pytest.mark.slow
def test_a_mesh_is_recommended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipes" / "meshed.yaml"
    given = ["mesh.search=true", "mesh.dense=hsdp", "mesh.recompute=false", f"recipe={path}"]
    assert main(["recommend", *FAST, *given]) == 0
    printed = capsys.readouterr().out
    assert "meshes fit" in printed
    assert "dense: hsdp" in path.read_text()


def test_a_recipe_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes=deepseek_v3_sim", "nodes=32", "hours=0.5", "failures.kind=none"]) == 0
    assert "mesh         pp=16 dp=16" in capsys.readouterr().out


def test_configuration_shows_every_field() -> None:
    shown = OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / "simulate.yaml"))
    assert isinstance(shown, dict)
    for key, cls, name in (
        ("hardware", Hardware, "preset"),
        ("mesh", MeshSpec, "search"),
        ("policy", Policy, "name"),
        ("failures", Failures, "kind"),
    ):
        assert set(shown[key]) == {field.name for field in fields(cls)} | {name}


def test_help_version_and_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    for argument, expected in (("--help", "usage: moe-sim"), ("--version", "moe-sim "), ("--cfg", "policy:")):
        assert main([argument]) == 0
        assert expected in capsys.readouterr().out


MISTAKES = [
    (["policy.slots=1"], "16 experts do not fit 8 ranks of 1 slots: add nodes or raise policy.slots"),
    (["compare=[mine]"], "compare='mine' is unknown"),
    (["failures.node_mtbf_hours=1e-9"], "failures.node_mtbf_hours=1e-09 makes about 4e+09 failures, more than"),
    (["mesh.tp=3"], "a mesh of pp=1, cp=1, tp=3 needs a multiple of 3 ranks, not 8"),
    (
        ["mesh.pp=2"],
        "mesh.pp=2 separates the head from the embedding that it is tied to: set model.tie_embeddings=false",
    ),
    (["mesh.pp=8", *UNTIED, "mesh.micro_batches=7"], "mesh.micro_batches=7 do not divide the 32 samples"),
    (["mesh.tp=8", "hardware.speeds=[1.0,0.5]"], "are simulated on nodes of one speed: leave"),
    (["mesh.search=true"], "mesh.search=true is for moe-sim recommend: say that, or give the axes"),
    (["recommend", "mesh.search=true", "mesh.cp=3"], "no mesh divides the 8 ranks of nodes=8"),
    (["recommend", "mesh.search=true", "hardware.memory_bytes=1e6"], "fits the 900 kB that a rank may plan with"),
]
"""Those that only a simulation finds; the others are in typical_mistakes.tsv."""


@pytest.mark.parametrize(("arguments", "sentence"), MISTAKES, ids=lambda value: str(value)[:40])
def test_mistakes_are_one_sentence(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    command = [argument for argument in arguments if argument == "recommend"]
    assert main([*command, *FAST, *(argument for argument in arguments if argument != "recommend")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("moe-sim: error: ")
    assert sentence in captured.err
    assert captured.err.count("\n") == 1


def test_traces_of_a_real_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("".join(f"0,add,n{i}\n" for i in range(8)) + "600000,remove,n3\n900000,add,n9\n")
    arguments = [*FAST, "hours=0.3", "failures.kind=trace", f"failures.path={trace}"]
    assert main(arguments) == 0
    assert "1 live replicas, 1 join" in capsys.readouterr().out
    for text, fault in (
        ("5,add,a\n1,add,b\n", "line 2: time 1 ms is before 5 ms"),
        ("0,add,a\n1,add,a\n", "line 2: a is added while it is there"),
        ("0,add,a\n1,remove,b\n", "line 2: b is removed while it is not there"),
        ("0,grow,a\n", "line 1: '0,grow,a' is not milliseconds,add|remove,node"),
        ("\u00b2,add,a\n", "is not milliseconds,add|remove,node: mend the trace"),
        (f"{'9' * 5000},add,a\n", "is not milliseconds,add|remove,node: mend the trace"),
        ("0,add,a\0b\n", "is not milliseconds,add|remove,node: mend the trace"),
        (f"0,add,{'a' * 200_000}\n", "cannot be read (field larger than field limit"),
        ("0,add,\udc80\n", "cannot be read (it is not UTF-8 text: invalid start byte at byte 6)"),
        ("9000000000000,add,a\n", "trace.csv has no node in its first"),
        ("", "is empty"),
    ):
        trace.write_text(text, errors="surrogateescape")
        assert main(arguments) == 2
        assert fault in capsys.readouterr().err
