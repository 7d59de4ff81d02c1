import pickle
import sys
from dataclasses import replace

import numpy as np
import pytest
import yaml

from gigamask import config_files, registry
from gigamask.config_files import check_run_folder, load_config, parse_train, save_config
from gigamask.data.augment import HorizontalFlip
from gigamask.recipes import tiny, user_code
from gigamask.samplers.random import Random
from gigamask.samplers.shards import Streamed
from gigamask.samplers.stratified import RELEVANCE
from gigamask.training.config import check_resume
from gigamask.training.optim import AdamW
from tests.errors import error_line

OWN = """
from dataclasses import dataclass
import numpy as np
from gigamask.interfaces import Sampler

@dataclass(frozen=True)
class Backwards(Sampler):
    skip: int = 1
    '''items left out at the end'''

    def order(self, table, epoch, history):
        return np.arange(table.count)[::-1]

@dataclass(frozen=True)
class Unset(Sampler):
    lanes: int
    def order(self, table, epoch, history): ...

class Unlike: ...
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own_sampler.py"
    path.write_text(OWN)
    return path


def test_a_name_chooses_a_component_and_flags_its_fields():
    words = "tiny --sampler streamed --sampler.lanes 4 --loader.augment=flip --optimizer adamw"
    run = parse_train(words.split()).run
    assert run.sampler == Streamed(lanes=4)
    assert run.loader.augment == HorizontalFlip()
    assert type(run.optimizer) is AdamW


def test_a_component_of_the_same_name_keeps_its_fields():
    run = replace(tiny(), sampler=Streamed(lanes=7))
    assert registry.select_components(run, {"sampler": "streamed"}) == run
    assert registry.select_components(run, {"sampler": "random"}).sampler == Random()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, message",
    [
        ("--sampler", r"^--sampler '' is unknown; choose from random, .*sharded, or file.py:Class"),
        ("--sampler --seed", r"^--sampler '' is unknown"),
        ("--sampler streaming", r"^--sampler 'streaming' .*random, .*sharded, .*streaming_tars$"),
        ("--sampler none.py:My", r"^none.py: "),
        ("--sampler {own}:Unlike", r"'Unlike' .*gigamask.interfaces.Sampler"),
        ("--sampler {own}:Unset", r"Unset.lanes in .* has no default"),
        ("--sampler random --sampler.lanes 2", r"--sampler.lanes"),
    ],
)
def test_an_unknown_component_is_a_one_line_error(own, words, message):
    with error_line(message):
        parse_train(f"tiny {words.format(own=own)}".split())


@pytest.mark.slow
def test_a_users_class_is_named_by_its_file(own, tmp_path):
    words = f"tiny --sampler {own}:Backwards --sampler.skip 3 --out {tmp_path}/run --data x"
    run = parse_train(words.split()).run
    assert type(run.sampler).__name__ == "Backwards"
    assert run.sampler.skip == 3
    save_config(run)
    assert load_config(run.out, trust=True) == run


@pytest.mark.slow
def test_saved_components_load_equal(tmp_path):
    words = "tiny --sampler streamed --sampler.buffer 9 --schedule cosine --data x"
    run = parse_train(f"{words} --out {tmp_path}".split()).run
    save_config(run)
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())["sampler"]
    assert saved == {"class": "streamed", "lanes": 1, "buffer": 9}
    assert load_config(str(tmp_path)) == run


@pytest.mark.slow
def test_flags_override_files(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("sampler: streamed\nsampler.lanes: 5\n")
    assert parse_train(["tiny", "--config", str(file)]).run.sampler == Streamed(lanes=5)
    assert parse_train(f"tiny --config {file} --sampler random".split()).run.sampler == Random()


SAMPLER_FLAGS = {
    "multi_level": "ratio 2 1 0",
    "distributed_balanced": "ranks 4",
    "tar_aware": "per-tar 100",
    "balanced_tar": "per-tar 1000",
    "chunked": "chunk 50",
    "stratified_granularity": "per-stratum 9",
    "relevance_diversity": "per-stratum 9",
    "multi_attribute": "attributes domain region",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.names("sampler"))
def test_every_sampler_keeps_its_name_and_flags_when_saved(name, tmp_path):
    flags = SAMPLER_FLAGS.get(name)
    words = f"tiny --sampler {name} --out {tmp_path} --data x"
    run = parse_train(f"{words} --sampler.{flags}".split() if flags else words.split()).run
    assert registry.name_of_component("sampler", run.sampler) == name
    assert registry.select_components(run, {"sampler": name}) == run
    save_config(run)
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())["sampler"]
    assert saved["class"] == name
    if flags:
        field, *typed = flags.split()
        assert [str(value) for value in np.atleast_1d(saved[field])] == typed
    assert load_config(str(tmp_path)) == run


def test_presets_of_one_class_are_distinguished_by_their_fixed_fields():
    for name in registry.names("sampler"):
        made = registry.make_component("sampler", name)
        assert registry.name_of_component("sampler", made) == name
    # With other flags, a preset may become another one of its class; that one still gives the same
    # sampler.
    other = replace(registry.make_component("sampler", "distributed_balanced"), ratio=(2, 1, 1))
    assert registry.name_of_component("sampler", other) == "multi_level"


def test_another_kind_of_sampler_is_another_order():
    saved = replace(tiny(), sampler=Random())
    with error_line(r"--sampler was gigamask.samplers.random.Random .*Streamed"):
        check_resume(saved, replace(saved, sampler=Streamed()), allow_data_change=False)


@pytest.mark.slow
def test_every_component_of_every_recipe_has_a_name():
    for recipe in config_files.recipes.built_in():
        run = recipe()
        chosen = {
            kind: registry.name_of_component(kind, registry.get_component(run, kind))
            for kind in registry.components_of(run)
        }
        assert all(name in registry.names(kind) for kind, name in chosen.items())
        assert registry.select_components(run, chosen) == run
    config = parse_train("tiny --data x --out never".split()).run
    assert check_run_folder(config, False) == {}


def test_relevance_diversity_is_stratified_by_relevance():
    assert registry.make_component("sampler", "relevance_diversity").attributes == RELEVANCE


def test_classes_of_the_script_that_runs_are_found_in_it(tmp_path, monkeypatch):
    """Its second import would run it again, and give classes of another name."""
    main = sys.modules["__main__"]
    script = tmp_path / "script.py"
    script.write_text("raise AssertionError")
    monkeypatch.setattr(main, "__file__", str(script), raising=False)
    monkeypatch.setattr(main, "Own", Own, raising=False)
    assert user_code.find_object(f"{script}:Own") is Own
    monkeypatch.delattr(main, "__file__")
    monkeypatch.setattr(Own, "__module__", "__main__")
    with error_line("Own: .* in a notebook .* put it into a .py file"):
        user_code.name_of_class(Own)


def test_a_file_that_trains_when_it_is_imported_is_told_how_not_to(tmp_path):
    (tmp_path / "unguarded.py").write_text("import gigamask\ngigamask.train('tiny')\n")
    with error_line("unguarded.py: .* it trains when it is imported.*__main__"):
        user_code.load_file(str(tmp_path / "unguarded.py"))


def test_a_file_that_failed_is_read_again_once_it_is_repaired(tmp_path):
    file = tmp_path / "repaired_recipe.py"
    file.write_text("import nothing_of_this_name")
    with error_line("repaired_recipe.py: .* ModuleNotFoundError"):
        user_code.load_file(str(file))
    file.write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        user_code.load_file(str(file))
    file.write_text("made = 'again'")
    assert user_code.find_object(f"{file}:made") == "again"


def test_a_file_named_like_another_module_does_not_replace_it(tmp_path):
    """Neither an imported module, nor an installed one, nor a file of the user's elsewhere."""
    before, found = sys.modules["json"], {}
    for name in ("json", "this", "here/scorer", "there/scorer"):
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"class Own:\n    name = {name!r}\n")
        found[name] = user_code.find_object(f"{file}:Own")
    assert sys.modules["json"] is before
    assert "this" not in sys.modules
    for name, kind in found.items():
        assert kind.name == pickle.loads(pickle.dumps(kind)).name == name
        assert user_code.find_object(user_code.name_of_class(kind)) is kind


class Own:
    pass
