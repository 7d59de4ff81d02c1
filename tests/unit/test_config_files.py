import json
import re
from dataclasses import replace

import pytest

from gigamask import config_files, recipes
from gigamask.cli.commands.train import warmup_note
from gigamask.config_files import (
    check_run_folder,
    load_config,
    parse_train,
    read_config,
    save_config,
)
from gigamask.recipes import tiny
from gigamask.samplers.random import Random
from gigamask.samplers.shards import Streamed
from gigamask.training.optim import MuonAdamW
from tests.errors import error_line
from tests.little import little


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, message",
    [
        (
            "--stepz 4",
            r"--stepz.*perhaps you meant --steps; see 'gigamask train tiny --help'$",
        ),
        ("--steps ten", r"^--steps .*whole number.*'ten'.*'gigamask train tiny --help'$"),
        ("--optimizer.lr high", r"^--optimizer.lr .*number.*'high'"),
        ("--lr=high", r"^--optimizer.lr .*number.*'high'"),
        ("--optimizer.betas 0.9 x", r"^--optimizer.betas .*'0.9 x'"),
        ("--profile few", r"^--profile .*whole number.*'few'"),
        ("--model.depth 0", r"^--model.depth .*0"),
        ("more", r"'more'"),
        ("--learning-rate 1", r"--learning-rate; perhaps you meant --lr;"),
        ("--batch 4", r"--batch; perhaps you meant --batch-size;"),
        ("--workers=4", r"--workers; perhaps you meant --num-workers;"),
        ("--weight-decay 0", r"--weight-decay; perhaps you meant --optimizer.weight-decay;"),
        ("--aug flip", r"--aug; perhaps you meant --loader.augment;"),
        ("--fp16", r"--fp16; perhaps you meant --precision fp16;"),
        ("--steps 3 --epochs 2", r"--epochs and --steps"),
        ("--epochs 0", r"^--epochs must be > 0 .*0\.0"),
        ("--precision fp8", r"^--precision .*auto, fastest, fp32, bf16, fp16 .*'fp8'"),
        ("--seed", r"^--seed needs a value"),
        ("--recipe compact", r"^--recipe is no flag: it is the first argument"),
    ],
)
def test_wrong_flags_are_one_line(words, message):
    with error_line(message) as fault:
        parse_train(f"tiny {words}".split())
    assert "│" not in str(fault.value)


@pytest.mark.slow
def test_leaves_are_flags():
    words = "tiny --data a.tar b.tar --loader.filters.min-area 9 --loader.half-scale"
    run = parse_train(f"{words} --optimizer.betas 0.8 0.9".split()).run
    assert run.data == ("a.tar", "b.tar")
    assert run.loader.filters.min_area == 9
    assert run.loader.half_scale
    assert run.optimizer.betas == (0.8, 0.9)
    assert replace(run, data=(), loader=tiny().loader, optimizer=tiny().optimizer) == tiny()


@pytest.mark.slow
def test_short_names_mean_the_flags_of_a_section(tmp_path):
    file = tmp_path / "short.yaml"
    file.write_text("lr: 1e-4\nnum_workers: 0\n")
    run = parse_train(f"tiny --config {file} --lr 2e-4".split()).run
    assert (run.optimizer.lr, run.loader.workers) == (2e-4, 0)


def test_numbers_may_lack_digits_beside_their_point():
    words = "tiny --data x --out r --lr .5 --optimizer.betas +.9 0. --init a/.5"
    run = parse_train(words.split()).run
    assert (run.optimizer.lr, run.optimizer.betas, run.init) == (0.5, (0.9, 0.0), "a/.5")


@pytest.mark.slow
def test_files_know_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "home.yaml").write_text("out: ~/run\ndata: [~/a, b]\nprocesses: ~")
    run = parse_train(["tiny", "--config", str(tmp_path / "home.yaml")]).run
    assert (run.out, run.data) == (f"{tmp_path}/run", (f"{tmp_path}/a", "b"))
    assert run.processes is None, "of itself, ~ is null in YAML"


def test_files_come_before_flags_and_may_nest(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "steps: 7\noptimizer:\n  lr: 1e-4\n  grad_clip: null\nloader.half-scale: true\ndata: "
        "[x.tar]\n"
    )
    run = parse_train(f"tiny --steps 9 --config {file}".split()).run
    assert (run.steps, run.data, run.loader.half_scale) == (9, ("x.tar",), True)
    assert (run.optimizer.lr, run.optimizer.grad_clip) == (1e-4, None)


@pytest.mark.slow
def test_files_may_be_named_in_several_ways(tmp_path):
    for name, line in (("a", "steps: 7"), ("b", "seed: 8"), ("c", "seed: 9")):
        (tmp_path / name).write_text(line)
    words = f"tiny --config {tmp_path}/a {tmp_path}/b --keep 3 --config={tmp_path}/c"
    run = parse_train(words.split()).run
    assert (run.steps, run.seed, run.keep) == (7, 9, 3)


@pytest.mark.slow
def test_the_last_file_counts_by_whichever_name_of_a_flag(tmp_path):
    for name, text in (("a", "lr: 1e-4"), ("b", "optimizer.lr: 2e-4"), ("c", "lr: 3e-4")):
        (tmp_path / name).write_text(text)
    words = f"tiny --config {tmp_path}/a {tmp_path}/b {tmp_path}/c"
    assert parse_train(words.split()).run.optimizer.lr == 3e-4


def test_files_that_are_not_a_configuration(tmp_path):
    with error_line(r"none.yaml.*No such file or directory"):
        read_config(str(tmp_path / "none.yaml"))
    with error_line("--config: cannot be read"):  # an unset shell variable
        parse_train(["tiny", "--config", "--steps", "2"])
    (tmp_path / "bad.yaml").write_text("a: [")
    with error_line(r"bad.yaml"):
        read_config(str(tmp_path / "bad.yaml"))
    (tmp_path / "list.yaml").write_text("- 1")
    with error_line(r"list.yaml"):
        read_config(str(tmp_path / "list.yaml"))
    (tmp_path / "odd.yaml").write_text("optimizer.lrr: 1")
    with error_line(r"odd.yaml: .*optimizer.lrr; perhaps you meant optimizer.lr;"):
        parse_train(["tiny", "--config", str(tmp_path / "odd.yaml")])


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        little(),
        tiny(),
        replace(little(), optimizer=replace(little().optimizer, grad_clip=None), init="w.pth"),
        little().with_(prompts__box_noise_limit_px=float("inf")),
    ],
)
def test_a_saved_run_reloads_equal(tmp_path, run):
    run = replace(
        run,
        out=str(tmp_path / "run"),
        data=("a b.tar", "c.tar"),
        loader=replace(run.loader, half_scale=True),
    )
    save_config(run)
    assert load_config(run.out, trust=True) == run
    assert (tmp_path / "run" / "origin.jsonl").read_text().count("\n") == 1


def test_a_partial_line_of_origin_is_ended(tmp_path):
    run = replace(little(), out=str(tmp_path))
    (tmp_path / "origin.jsonl").write_text('{"argv": ["a"')
    save_config(run)
    save_config(run)
    cut, *lines = (tmp_path / "origin.jsonl").read_text().splitlines()
    assert cut == '{"argv": ["a"'
    assert [json.loads(line).keys() >= {"argv", "git"} for line in lines] == [True, True]


DAMAGED = {
    "empty": b"",
    "zeros": bytes(4096),
    "not text": b"\xff\xfe\x00steps",
    "not YAML": b"recipe: [tiny",
    "a list": b"- recipe: tiny",
    "no recipe": b"steps: '7'",
    "of an older version": b"recipe: tiny\nsteps: '7'\noptimizer.lr: '0.001'\n",
    "aliases": b"a: &a [x]\nb: [*a, *a]\nrecipe: tiny",
    "nested": b"[" * 1_000,
    "missing": None,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_config_does_not_lock_a_run_out(kind, tmp_path):
    run = replace(little(), out=str(tmp_path))
    (tmp_path / "checkpoints" / "step_00000002").mkdir(parents=True)
    if (content := DAMAGED[kind]) is not None:
        (tmp_path / "config.yaml").write_bytes(content)
    with error_line(r"config.yaml.* (run|again)"):
        parse_train(["--resume", run.out])
    with pytest.warns(UserWarning, match=r"config.yaml.*written again") as told:
        assert check_run_folder(replace(run, data=("x",)), False) == {}
    assert len(told) == 1
    save_config(run)
    assert load_config(run.out, trust=True) == run


@pytest.mark.slow
def test_a_changed_value_in_a_saved_config_is_noticed(tmp_path):
    run = replace(little(), out=str(tmp_path), steps=7)
    save_config(run)
    path = tmp_path / "config.yaml"
    path.write_text(path.read_text().replace("steps: 7", "steps: 6"))
    with pytest.warns(UserWarning, match=r"config.yaml: was edited or damaged"):
        assert load_config(run.out, trust=True).steps == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "second, flags, expected",
    [
        ("sampler: random\n", "", Random()),
        ("sampler: streamed\n", "", Streamed(buffer=10)),
        ("sampler: streamed\nsampler.lanes: 5\n", "", Streamed(buffer=10, lanes=5)),
        ("steps: 3\n", "--sampler random", Random()),
        ("sampler: random\n", "--sampler streamed", Streamed()),
    ],
)
def test_the_fields_of_a_component_that_a_later_file_replaces_are_dropped(
    second, flags, expected, tmp_path
):
    (tmp_path / "a.yaml").write_text("sampler: streamed\nsampler.buffer: 10\n")
    (tmp_path / "b.yaml").write_text(second)
    words = f"tiny --config {tmp_path}/a.yaml --config {tmp_path}/b.yaml {flags}"
    assert parse_train(words.split()).run.sampler == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "line, message",
    [
        ("optimizer.lr: high", r"^\S*b.yaml: optimizer.lr must be a number .*'high'"),
        ("optimizer:\n  lr: [1, 2]", r"^\S*b.yaml: optimizer.lr .*'1 2'"),
        ("lr: 1\noptimizer: {lr: 2}", r"^\S*b.yaml: optimizer.lr is given under two names"),
        ("optimizer.betas: [0.9]", r"^\S*b.yaml: optimizer.betas must be 2 values.*'0.9'"),
        ("sampler: randm", r"^\S*b.yaml: --sampler 'randm'.*perhaps you meant random"),
        ("sampler: [a]", r"^\S*b.yaml: .*sampler"),
        ("model.depth: 0", r"^\S*b.yaml: .*depth"),
        ("loader: 5", r"^\S*b.yaml: unknown key loader"),
        ("stepz: 5", r"^\S*b.yaml: unknown key stepz; perhaps you meant steps;"),
        ("data: [{a: b}]", r"^\S*b.yaml: data .*list"),
        ("help: x", r"^\S*b.yaml: unknown key help"),
    ],
)
def test_an_error_in_a_file_names_the_file_and_the_key(line, message, tmp_path):
    (tmp_path / "a.yaml").write_text("steps: 7\n")
    (tmp_path / "b.yaml").write_text(line + "\n")
    with error_line(message):
        parse_train(f"tiny --config {tmp_path}/a.yaml {tmp_path}/b.yaml".split())


def test_train_needs_a_recipe_or_a_run(tmp_path):
    for words in ([], ["--steps", "3"]):
        with error_line(r"sam_vit_b.*sam_vit_l.*sam_vit_h.*file.py:function"):
            parse_train(words)
    with error_line("--resume"):
        parse_train(["--resume"])
    with error_line(r"config.yaml"):
        parse_train(["--resume", str(tmp_path)])
    with error_line(r"'huge'"):
        parse_train(["huge"])
    with error_line(r"tiny is for 'gigamask train', not 'gigamask dist"):
        parse_train(["tiny", "--teacher", "w.pth"], "distill")


@pytest.mark.slow
def test_resume_takes_flags_and_refuses_other_shapes(tmp_path):
    run = replace(little(), out=str(tmp_path / "run"), data=("x.tar",))
    save_config(run)
    flags = parse_train(["--resume", run.out, "--steps", "11"])
    assert flags.run == replace(run, steps=11)
    with error_line("leave out --out elsewhere"):
        parse_train(["--resume", run.out, "--out", "elsewhere"])
    assert check_run_folder(flags.run, False) == {}, "there is no checkpoint to differ from"
    (tmp_path / "run" / "checkpoints" / "step_00000002").mkdir(parents=True)
    assert check_run_folder(flags.run, False) == {"steps": (4, 11)}
    words = f"--resume {run.out} --model.depth 3 --model.global-attn-indexes 1"
    with error_line("shape"):
        check_run_folder(parse_train(words.split()).run, False)


@pytest.mark.parametrize(
    "words, warmup_steps",
    [
        ("", 50),
        ("--steps 100", 25),
        ("--steps 400", 50),
        ("--steps 100 --schedule.warmup-steps 50", 50),
        ("--steps=100 --schedule.warmup_steps=80", 80),
        ("--steps 100 --schedule multistep", 25),
    ],
)
def test_fewer_steps_limit_a_warm_up_that_is_not_set(words, warmup_steps):
    assert parse_train(f"tiny {words}".split()).limited.schedule.warmup_steps == warmup_steps


@pytest.mark.slow
def test_a_limited_warm_up_is_said():
    flags = parse_train(["tiny", "--steps", "100"])
    [line] = warmup_note(flags.run, flags.limited).splitlines()
    assert re.search(r"--steps 100 .*--schedule\.warmup-steps 25 .*50", line)
    flags = parse_train(["tiny", "--steps", "1000"])
    assert warmup_note(flags.run, flags.limited) == ""


@pytest.mark.slow
def test_files_and_saved_runs_keep_their_warm_up(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("steps: 100\nschedule: {warmup-steps: 60}")
    assert parse_train(["tiny", "--config", str(file)]).limited.schedule.warmup_steps == 60
    run = replace(tiny(), steps=100, out=str(tmp_path / "run"))
    save_config(run)
    assert parse_train(["--resume", run.out]).limited == run
    assert parse_train(["--resume", run.out, "--steps", "40"]).limited.schedule == run.schedule


@pytest.mark.slow
def test_help_begins_with_the_flags_that_people_use(capsys):
    with pytest.raises(SystemExit) as leaving:
        parse_train(["tiny", "--sampler", "streamed", "--help"])
    assert not leaving.value.code
    out = capsys.readouterr().out
    listed = re.findall(r"^  --([a-z-]+)", out, re.MULTILINE)
    first = "data out images masks init steps epochs batch-size lr resume"
    assert " ".join(listed[:10]) == first
    sections = re.findall(r"^(\S.*):$", out, re.MULTILINE)
    assert sections[:2] == ["options", "more options"]
    assert sections[-3:] == ["stages", "on a cluster", "of all commands"]
    assert "--loader.max-masks INT" in out
    assert "--sampler.lanes" in out
    assert "\noptimizer:\n  Muon for the weight matrices" in out
    assert "mask choice, prompts) (default: 0)" in " ".join(out.split())
    assert "--compile, --no-compile" in out
    assert "--loader.half-scale, --loader.no-half-scale" in out


@pytest.mark.slow
@pytest.mark.parametrize("recipe", recipes.built_in(), ids=lambda recipe: recipe.__name__)
def test_every_value_of_a_config_file_may_be_typed(recipe):
    config = recipe()
    words = []
    for name, value in config_files.config_as_text(config).items():
        if name != "recipe":
            words += [f"--{name}", *((value or ["[]"]) if isinstance(value, list) else [value])]
    typed = config_files.parse_train([config.recipe, *words], config.command).run
    assert typed == config


@pytest.mark.slow
@pytest.mark.parametrize("value", ["null", "None"])
def test_null_is_typed_as_in_files(value):
    words = ["tiny", "--micro-batch-size", "4", "--micro-batch-size", value, f"--init={value}"]
    run = config_files.parse_train([*words, "--out", "null"]).run
    assert (run.micro_batch_size, run.init, run.out) == (None, None, "null")
    with error_line("--steps must be a whole number"):
        config_files.parse_train(["tiny", "--steps", value])


def test_lr_alone_changes_both_rates_of_muon(tmp_path):
    both = tiny().optimizer
    (tmp_path / "slow.yaml").write_text(f"optimizer: {{lr: {both.lr / 4}}}")
    other = MuonAdamW(muon_lr=both.muon_lr).lr
    words = ["--lr", str(other / 4), "--optimizer", "muon", "--data", "a", "--out", "b"]
    scaled = parse_train(["sam_vit_b", *words]).run.optimizer
    assert scaled.muon_lr == pytest.approx(MuonAdamW().muon_lr / 4)
    for words, factor in (
        (["--lr", str(both.lr / 4)], 1 / 4),
        (["--config", str(tmp_path / "slow.yaml")], 1 / 4),
        (["--lr", str(both.lr / 4), "--optimizer.muon-lr", str(both.muon_lr)], 1),
        (["--optimizer", "muon"], 1),
    ):
        found = parse_train(["tiny", "--data", "a", "--out", "b", *words]).run.optimizer
        assert found.muon_lr == pytest.approx(factor * both.muon_lr)
    assert (
        tiny().with_(optimizer__lr=both.lr / 4).optimizer
        == parse_train(
            ["tiny", "--data", "a", "--out", "b", "--lr", str(both.lr / 4)]
        ).run.optimizer
    )
    adamw = parse_train(["tiny", "--data", "a", "--out", "b", "--optimizer", "adamw", "--lr", "1"])
    assert adamw.run.optimizer.lr == 1


def test_a_configuration_that_no_run_wrote_is_not_replaced(tmp_path):
    config = little().with_(data="tars", out=tmp_path)
    own = tmp_path / "config.yaml"
    own.write_text("# my flags\nsteps: 2\n")
    (tmp_path / "lock").touch()  # of a training that was refused
    with error_line(r"config.yaml: would be replaced, but no run wrote it"):
        config_files.check_run_out(config)
    save_config(config)
    config_files.check_run_out(config)
