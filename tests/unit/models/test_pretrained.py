"""`Sam.from_pretrained` and `save_pretrained`: folders, files, models of the Hugging Face Hub."""

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gigamask.models.configs import mae_tiny, tiny
from gigamask.models.hub import parse_hub_id
from gigamask.models.init import build_model
from gigamask.models.sam.sam import Sam
from gigamask.models.state_dict import save_weights, to_official
from tests.errors import error_line
from tests.little import SPEC, little
from tests.servers import Hub


@pytest.fixture
def model() -> Sam:
    return build_model(replace(SPEC, decoder_num_heads=4), 7).eval()


def assert_equal(model: Sam, other: Sam) -> None:
    weights, others = model.state_dict(), other.state_dict()
    assert weights.keys() == others.keys()
    assert all(torch.equal(others[name], value) for name, value in weights.items())


def test_a_loaded_model_is_whole_on_the_default_device():
    with torch.device("meta"):
        loaded = Sam.from_pretrained("starter")
    assert {each.device.type for each in [*loaded.parameters(), *loaded.buffers()]} == {"meta"}


@pytest.mark.slow
def test_a_saved_folder_loads_equal_and_leaves_the_global_random_state(model, tmp_path):
    model.save_pretrained(tmp_path / "new" / "folder")
    before = torch.get_rng_state()
    loaded = Sam.from_pretrained(tmp_path / "new" / "folder")
    assert torch.equal(torch.get_rng_state(), before)
    assert_equal(model, loaded)
    assert loaded.config.decoder_num_heads == 4
    assert not loaded.training
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == [
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    ]


def test_a_folder_saved_in_half_precision_loads(model, tmp_path):
    model.bfloat16().save_pretrained(tmp_path)
    assert_equal(model.float(), Sam.from_pretrained(tmp_path))


@pytest.mark.slow
def test_transformers_loads_a_saved_folder(model, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import SamModel

        model.save_pretrained(tmp_path)
        theirs, report = SamModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert theirs.config.mask_decoder_config.num_attention_heads == 4


@pytest.mark.slow
def test_files_load_too(model, tmp_path):
    torch.save(dict(build_model(tiny(), 3).state_dict(keep_vars=True)), tmp_path / "tiny.pth")
    with error_line(r"tiny\.pth: its configuration is not known"):
        Sam.from_pretrained(tmp_path / "tiny.pth")
    little = tmp_path / "little.safetensors"
    save_weights(to_official(model), model.config, little)
    assert_equal(model, Sam.from_pretrained(little))
    listed = replace(model.config, global_attn_indexes=[*model.config.global_attn_indexes])
    with pytest.warns(UserWarning, match="states") as warned:
        Sam.from_pretrained(little, replace(listed, decoder_num_heads=2, image_size=32))
    [line] = warned
    assert "states decoder_num_heads 4, but is built with 2" in str(line.message)
    assert Sam.from_pretrained(str(tmp_path / "tiny.pth"), tiny()).config == tiny()


def test_other_weights_are_refused(tmp_path, monkeypatch):
    save_weights(build_model(mae_tiny(), 0).state_dict(), mae_tiny(), tmp_path / "mae.safetensors")
    with error_line(r"mae.safetensors.*SAM"):
        Sam.from_pretrained(tmp_path / "mae.safetensors")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for path in ("runs/tiny", "model.pth", "us/sam.pth", "/us/sam"):
        with error_line(f"{path}: no such file or folder( in .*)?;"):
            Sam.from_pretrained(path)


@pytest.mark.slow
def test_a_training_may_start_from_the_hub(scenes):
    config = replace(little(), data=(str(scenes),), init="us/sam")
    config.check_inputs()
    with error_line("--init nowhere:"):
        replace(config, init="nowhere").check_inputs()


LOAD = """
import sys
from gigamask import GigamaskError, Sam
for number, hub_id in enumerate(sys.argv[1:]):
    try:
        Sam.from_pretrained(hub_id).save_pretrained(f"saved{number}")
    except GigamaskError as error:
        print(error)
"""


def load_in_a_process(folder: Path, *hub_ids: str, **variables: str) -> list[str]:
    """Load models in a process of its own, which reads the Hub's address; return the errors."""
    environment = {**os.environ, "HF_HOME": str(folder / "cache"), **variables}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *hub_ids],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
@pytest.mark.slow
def test_a_model_of_the_hub_is_downloaded_once(model, tmp_path):
    main, older = tmp_path / "hub/us/sam/main", tmp_path / "hub/us/sam/v1"
    main.mkdir(parents=True)
    model.save_pretrained(main)
    (main / "pytorch_model.bin").write_bytes(b"not downloaded")
    older.mkdir()
    first = build_model(model.config, 9)
    first.save_pretrained(older)
    other = tmp_path / "hub/us/gray/main"
    model.save_pretrained(other)
    scaled = '{"image_processor": {"image_mean": [0.5, 0.5, 0.5]}}'
    (other / "processor_config.json").write_text(scaled)
    hub_ids = ("us/sam", "us/nothing", "us/no..thing", "hf:us/sam@v1", "us/sam@v2", "us/gray")
    with Hub(tmp_path / "hub") as hub:
        errors = load_in_a_process(tmp_path, *hub_ids, HF_ENDPOINT=hub.endpoint)
    assert "processor_config.json: image_mean is [0.5, 0.5, 0.5]" in errors.pop()
    refused = [error.partition(":")[0] for error in errors]
    assert refused == ["us/nothing", "us/no..thing", "us/sam@v2"]
    assert_equal(model, Sam.from_pretrained(tmp_path / "saved0"))
    assert_equal(first, Sam.from_pretrained(tmp_path / "saved3"))
    assert not list((tmp_path / "cache").rglob("*.bin"))
    known = ("us/sam", "us/sam@v1")
    without_server = load_in_a_process(tmp_path, *known, "us/other", HF_ENDPOINT=hub.endpoint)
    assert [error.partition(":")[0] for error in without_server] == ["us/other"]


def test_ids_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_hub_id("us/sam") == ("us/sam", None)
    assert parse_hub_id("us/sam@v1") == parse_hub_id("hf:us/sam@v1") == ("us/sam", "v1")
    for path in ("sam", "/us/sam", "us/sam.pth", "us/sam@", "a/b/c"):
        assert parse_hub_id(path) is None
    for wrong in ("hf:", "hf:sam", "hf:a/b/c", "hf:us/sam@ v"):
        with error_line(r"hf:ORGANIZATION/NAME"):
            parse_hub_id(wrong)
    (tmp_path / "us").mkdir()
    assert parse_hub_id("us/sam") is None, "a path below a folder"
    assert parse_hub_id("hf:us/sam") == ("us/sam", None)
