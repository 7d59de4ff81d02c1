"""Grounding is trained by the one loop: stopped, killed, cut and shared out, it is the same
training.
"""

import itertools
import json
import multiprocessing
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gigamask.cli.main import main
from gigamask.losses.ohem import OHEM
from gigamask.plugins.grounding import queries
from gigamask.plugins.grounding.config import GroundingEvalConfig
from gigamask.plugins.grounding.inference import load_model
from gigamask.plugins.grounding.mask_features import MaskFeatureExtractor
from gigamask.plugins.grounding.text_encoders import WordTransformer
from gigamask.samplers.curriculum import Curriculum
from gigamask.samplers.hard_examples import LossWeighted
from gigamask.samplers.stratified import RELEVANCE, Stratified
from gigamask.training import checkpoint
from gigamask.training.logging import MetricsLogger
from gigamask.training.state import TrainState
from gigamask.training.step import step
from gigamask.training.train_data import TrainData, open_index
from gigamask.training.trainer import train
from tests.errors import error_line
from tests.laws.test_training import same
from tests.plugins.grounding.asked import run_in
from tests.plugins.grounding.unit.test_evaluation import spoilt
from tests.plugins.grounding.unit.test_model import query_batch
from tests.ranks import fork

WORDS = WordTransformer(dim=16, layers=1, heads=2)


def die_after_four(run) -> None:
    log_step = MetricsLogger.log_step

    def dying(self, step, images, figures):
        log_step(self, step, images, figures)
        if step == 4:
            while not checkpoint.newest(Path(run.out)):  # it is written during the next steps
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    MetricsLogger.log_step = dying
    train(run)


@pytest.mark.parametrize(
    "parts",
    [
        {"lora_rank": 2, "ema": 0.9},
        {"text": WORDS},
        {"sampler": LossWeighted(per_epoch=20), "mining": OHEM(keep_ratio=0.5)},
    ],
)
@pytest.mark.usefixtures("one_thread")
def test_six_steps_are_three_killed_and_three_more(tmp_path, described, parts):
    """Killed behind the checkpoint of step 3, in step 5; adapters of the text model come back with
    it."""
    whole = train(run_in(tmp_path / "whole", described, steps=6, **parts))
    run = run_in(tmp_path / "killed", described, steps=6, **parts)
    process = multiprocessing.get_context("fork").Process(target=die_after_four, args=(run,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert checkpoint.newest(Path(run.out)).name == "step_00000003"
    assert same(whole, train(run))
    begun = run.build().state_dict()
    now = whole.model.state_dict()
    moved = {name for name in now if not torch.equal(now[name], begun[name])}
    assert len(moved) > 0.9 * len(begun), "it has learned"
    held = load_file(checkpoint.newest(Path(run.out)) / checkpoint.MODEL)
    texts = {name for name in held if name.startswith("text.")}
    assert texts <= moved
    if "text" in parts:
        assert "text.embed_tokens.weight" in texts
        return
    assert all(
        name.startswith("text.adapters.") and name.endswith(("lora_A", "lora_B")) for name in texts
    )
    assert len(texts) == (8 if "lora_rank" in parts else 0)


def logits(model) -> torch.Tensor:
    """How far masks score above none, for random queries. What moves all scores alike has no
    gradient but rounding, of which Adam makes steps."""
    batch = query_batch(masks=7)
    with torch.no_grad():
        words = batch.text_features
        scores = model(batch.features, batch.mask_valid, words.features, words.attention_mask)
    return (scores[:, :-1] - scores[:, -1:])[batch.mask_valid]


def steps_of(run, cuts):
    """Two updates at these sizes of micro-batches: the state, the outcome of the second and the
    gradient of the first."""
    states = []
    for micro in cuts:
        cut = replace(run, micro_batch_size=micro)
        state = TrainState.initialize(cut, torch.device("cpu"))
        made = TrainData(cut, open_index(cut)).batches()
        task = cut.task(torch.device("cpu"))
        for _ in range(2):
            done = step(task, state, next(made), run.batch_size, 1e-3, 1.0).result()
            assert not done.skipped
            if state.step == 0:
                gradient = torch.cat([each.grad.flatten() for each in state.model.parameters()])
            state.step += 1
        states.append((state, done, gradient))
    return states


@pytest.mark.parametrize(
    "parts",
    [
        {"lora_rank": 2},
        {"text": WORDS},
        {"mining": OHEM(keep_ratio=0.4), "sampler": LossWeighted(per_epoch=20, importance=True)},
    ],
)
def test_micro_batches_make_the_step_of_the_batch(tmp_path, described, parts):
    (whole, told, gradient), *others = steps_of(
        run_in(tmp_path / "run", described, batch_size=9, **parts), (9, 2)
    )
    for state, done, other in others:
        assert (other - gradient).abs().max() < 1e-5 * gradient.abs().max()
        assert done.losses == pytest.approx(told.losses, rel=1e-4)
        assert done.record == pytest.approx(told.record, rel=1e-4, abs=1e-6)
        assert torch.allclose(logits(state.model), logits(whole.model), atol=1e-3)


def train_losses(out: str) -> list[float]:
    told = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in told if "loss" in line]


def test_two_ranks_train_what_one_trains(tmp_path, described):
    parts = {
        "mining": OHEM(keep_ratio=0.5),
        "val_split": 0.5,
        "evaluation": GroundingEvalConfig(interval=3, count=12),
    }
    alone = run_in(tmp_path / "alone", described, steps=6, **parts)
    state = train(alone)
    run = run_in(tmp_path / "both", described, steps=6, **parts)
    fork(2, main, ["ground", "train", "--resume", run.out])
    model, begun = load_model(run, run.out), run.build()
    assert torch.allclose(logits(model), logits(state.model), atol=1e-3)
    assert not torch.allclose(logits(begun), logits(state.model), atol=1e-2)
    both, alike = (train_losses(each.out) for each in (run, alone))
    assert len(both) == 6
    assert both == pytest.approx(alike, rel=1e-4)
    assert (Path(run.out) / "checkpoints" / "best").exists()


@pytest.mark.parametrize("sampler", [Curriculum(), Stratified(RELEVANCE, epoch_length="data")])
def test_samplers_of_queries_order_them(tmp_path, described, sampler):
    run = run_in(tmp_path / "run", described, sampler=sampler, batch_size=8)
    feed = TrainData(run, open_index(run))
    dataset = run.data_source(open_index(run)).make_loader(False).dataset
    steps = itertools.islice(feed.batches(), 2)
    seen = [text for batches in steps for batch in batches for text in batch.texts]
    order = sampler.order(dataset.items, 0, None)
    wanted = order[np.arange(min(16, len(order)))]
    expected = [dataset.queries[number].text for number in wanted.tolist()]
    assert seen[: len(wanted)] == expected


def test_later_epochs_encode_no_image(tmp_path, described, monkeypatch):
    """Neither in the process that saw them first nor in another, with what is kept on disk."""
    made = []
    begin = MaskFeatureExtractor.__init__

    def noted(self, *given, **named):
        begin(self, *given, **named)
        made.append(self)

    monkeypatch.setattr(MaskFeatureExtractor, "__init__", noted)
    run = run_in(
        tmp_path / "run", described, cache=None, batch_size=36, micro_batch_size=36, steps=4
    )
    train(run)
    assert [each.encoded for each in made] == [6], "two epochs of 72 queries about six images"
    train(replace(run, steps=6))
    assert made[-1].encoded == 0
    assert len(list(run.backbones.cache_folder.glob("*.embedding"))) == 6


def test_resume_rejects_other_queries_unless_allowed(tmp_path, described):
    """The file has another content under the same name."""
    path = tmp_path / "queries.jsonl"
    shutil.copy(described / "scenes" / "queries.jsonl", path)
    run = run_in(tmp_path / "run", described, queries=(str(path),), steps=2)
    train(run)
    queries.write(path, queries.read(path)[:-1])
    more = replace(run, steps=3)
    with error_line(rf"^{path}.*{run.out}"):
        train(more)
    assert train(more, allow_data_change=True).step == 3


def test_a_trained_network_starts_another(tmp_path, described):
    run = run_in(tmp_path / "run", described, steps=2)
    trained = train(run).model.state_dict()
    other = run_in(tmp_path / "other", described, init=run.out)
    state = TrainState.initialize(other, torch.device("cpu"), other.init)
    torch.testing.assert_close(state.model.state_dict(), trained, rtol=0, atol=0)


def test_images_that_cannot_be_read_are_left_out_named_and_too_many_stop_it(tmp_path, described):
    run = spoilt(
        run_in(tmp_path / "run", described, batch_size=36, micro_batch_size=36, steps=4),
        tmp_path,
        [1],
    )
    state = train(run)
    assert state.step == 4
    lines = (Path(run.out) / "metrics.jsonl").read_text()
    assert lines.count('"skipped_sample": "sa_000000.tar:sa_1"') == 1
    (tmp_path / "worse").mkdir()
    worse = spoilt(
        replace(run, data=(str(described / "scenes"),), steps=2, max_bad_fraction=0.0),
        tmp_path / "worse",
        [0, 2, 5],
    )
    with error_line(r"/worse/out: 3 of \d+ samples.*0.0%"):
        train(worse)


def test_it_learns(tmp_path, described):
    """Twenty-four queries by heart: the loss of the last steps is a fraction of the first."""
    run = run_in(tmp_path / "run", described, batch_size=24, micro_batch_size=24, steps=40)
    state, task = TrainState.initialize(run, torch.device("cpu")), run.task(torch.device("cpu"))
    made = TrainData(run, open_index(run)).batches()
    batches = next(made)
    losses = [step(task, state, batches, 24, 1e-2, 1.0).result().record["loss"] for _ in range(40)]
    made.close()
    assert losses[-1] < 0.5 * losses[0]
