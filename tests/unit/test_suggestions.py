import pytest

from gigamask.cli import main
from gigamask.suggestions import COMMANDS, FLAGS, suggest_command, suggest_flag


@pytest.mark.parametrize(
    "word, command",
    [
        *(("predict", "segment"), ("Infer", "segment"), ("val", "evaluate"), ("test", "evaluate")),
        *(("fit", "train"), ("finetune", "train"), ("import", "convert")),
        *(("generate", "synth"), ("info", "stats"), ("evalute", "evaluate"), ("zzz", None)),
    ],
)
def test_suggest_command(word, command):
    assert suggest_command(word, main.commands()) == command


@pytest.mark.parametrize(
    "flag, meant",
    [
        *(("--learning-rate", "--lr"), ("--base_lr", "--lr"), ("--LR", "--lr")),
        *(("--bs", "--batch-size"), ("--batch_size", "--batch-size"), ("--max-steps", "--steps")),
        *(("--workers", "--num-workers"), ("--amp", "--precision auto"), ("--name", "--out")),
        *(("--betas", "--optimizer.betas"), ("--stepz=3", "--steps"), ("--zzz", None)),
        *(("--checkpoint", "WEIGHTS, an argument without a flag"), ("--gpu", None)),
        ("--epochs", "--epochs of 'gigamask train'"),
    ],
)
def test_suggest_flag(flag, meant):
    known = "--lr --batch-size --steps --num-workers --precision --out".split()
    assert suggest_flag(flag, [*known, "--optimizer.betas"], ["weights"]) == meant


def test_out_of_a_command_whose_folder_has_no_flag():
    assert suggest_flag("--out", ["--seed"], ["folder"]) == "FOLDER, an argument without a flag"


def test_no_name_is_listed_twice():
    tried = [name for names in COMMANDS.values() for name in names.split()]
    assert len(tried) == len(set(tried))
    assert not set(tried) & set(main.commands())
    for hint, names in FLAGS.items():
        assert len(names.split()) == len({*names.split()}), hint


@pytest.mark.parametrize(
    "flag, meant",
    [
        ("--conf", "--pred-iou-thresh"),
        ("--iou", "--box-nms-thresh"),
        ("--project", "--out"),
        ("--imgsz", "no flag (images are resized to the input size of the model)"),
        ("--epochs", "--epochs of 'gigamask train'"),
        ("--quiet", "'--progress none'"),
    ],
)
def test_flags_of_other_tools(flag, meant):
    known = ["--pred-iou-thresh", "--box-nms-thresh", "--out"]
    assert suggest_flag(flag, known, ["weights"]) == meant
