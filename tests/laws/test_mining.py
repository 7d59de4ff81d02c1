"""Laws of mining masks: a step is made of the hardest of its global batch, however that is cut, and
of nothing else.
"""

import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gigamask import config_files
from gigamask.data.loader import SampleSource
from gigamask.data.sample_table import granularity, open_sample_table
from gigamask.distributed.world import World, destroy_world, init_world
from gigamask.errors import CorruptSampleError
from gigamask.interfaces import Loss, Mining
from gigamask.losses.ohem import OHEM, NoMining
from gigamask.losses.sam_loss import SamLoss
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.prompts.two_sided import TwoSidedCorrection
from gigamask.samplers.stratified import InterleavedStrata, Stratified
from gigamask.training.state import TrainState
from gigamask.training.step import StepResult, step
from gigamask.training.tasks import make_decoder, select_random_inputs, targets_from_batch
from gigamask.training.train_data import TrainData, open_index
from gigamask.types import Batch, LossSums, PromptRound, Targets
from tests.errors import error_line
from tests.laws.test_training import run_in
from tests.little import little
from tests.ranks import fork

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
MININGS = [
    OHEM(0.25),
    OHEM(0.01, min_kept=9),
    OHEM(0.4, group_by="granularity"),
    OHEM(0.3, min_kept=2, group_by="sampler"),
]


def mining_run(folder: Path, scenes: Path, mining: Mining, **changes):
    """A step of five images, fifteen masks, two rounds."""
    sampler = Stratified(per_stratum=4) if mining.use_sampler_strata else little().sampler
    loader, prompts = (
        replace(little().loader, max_masks=3),
        InteractiveSchedule(clicks=1, mask_only_rounds=False),
    )
    return run_in(
        folder,
        scenes,
        mining=mining,
        sampler=sampler,
        batch_size=5,
        loader=loader,
        **{"prompts": prompts, **changes},
    )


def fresh(run) -> TrainState:
    """The state in float64, of plain gradient descent: a parameter then shows its gradient, small
    ones as well as large ones."""
    state = TrainState.from_model(TrainState.initialize(run, CPU).model.double(), run)
    state.optimizers = [
        torch.optim.SGD([{"params": list(state.model.parameters()), "lr_scale": 1.0}], lr=0.0)
    ]
    return state


def whole_batch(run) -> Batch:
    """The first batch, as one micro-batch."""
    (batch,) = next(
        TrainData(replace(run, micro_batch_size=run.batch_size), open_index(run)).batches()
    )
    return batch


def flat(state: TrainState) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in state.model.parameters()])


def after(
    run, world: World | None = None, weigh=lambda place: 1.0
) -> tuple[torch.Tensor, StepResult]:
    """How far all parameters moved in one step of rate 1, and what it says."""
    state = fresh(run)
    start, batches = flat(state), next(TrainData(run, open_index(run)).batches(world))
    batches = [
        replace(batch, weights=torch.tensor([weigh(place) for place in batch.batch_index.tolist()]))
        for batch in batches
    ]
    done = step(run.task(CPU), state, batches, run.batch_size, 1.0, None, world).result()
    return flat(state) - start, done


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return float((a - b).abs().max()) < 1e-10 * float(a.abs().max())


def plainly(run) -> tuple[torch.Tensor, np.ndarray, Counter]:
    """The same by the definition: one graph of everything, the mean over rounds of the masks that a
    sort keeps. Also how many of each place."""
    state = fresh(run)
    start, model = flat(state), state.model
    batch = whole_batch(run)
    every = slice(0, len(batch.mask_image))
    embedding = model.encode(batch.images, batch.input_sizes, batch.random_inputs.drop_path)
    decode = make_decoder(model, embedding, batch.mask_image, "fp32")
    truth, draws = (
        targets_from_batch(batch, every, model.config.mask_size),
        select_random_inputs(batch.random_inputs, every),
    )
    previous, losses = None, []
    while (
        prompts := run.prompts.next(previous, truth, draws, batch.mask_only_round_u)
    ) is not None:
        previous = PromptRound(len(losses), prompts, decode(prompts))
        losses.append(run.loss(previous, truth).per_mask)
    told = sum(losses).tolist()
    strata = [0] * len(told) if run.mining.group_by == "batch" else batch.strata.tolist()
    kept: list[int] = []
    for stratum in set(strata):
        members = sorted(
            (mask for mask, each in enumerate(strata) if each == stratum),
            key=lambda mask: -told[mask],
        )
        kept += members[
            : max(int(np.ceil(len(members) * run.mining.keep_ratio)), run.mining.min_kept)
        ]
    torch.stack([loss[mask] for loss in losses for mask in kept]).mean().backward()
    for parameter in model.parameters():
        parameter.data -= parameter.grad
    places = batch.batch_index[batch.mask_image].tolist()
    means = [
        np.mean(
            [loss / len(losses) for loss, at in zip(told, places, strict=True) if at == place]
            or np.nan
        )
        for place in range(run.batch_size)
    ]
    return flat(state) - start, np.array(means), Counter(places[mask] for mask in kept)


@pytest.mark.parametrize("mining", MININGS, ids=repr)
def test_however_a_batch_is_cut_its_step_is_that_of_the_definition(tmp_path, scenes, mining):
    """In micro-batches and groups of masks of any size; the losses of all masks are recorded, also
    of those that are not kept."""
    run = mining_run(tmp_path / "run", scenes, mining)
    expected, losses, _ = plainly(run)
    everything, _ = after(replace(run, mining=NoMining()))
    assert float((everything - expected).abs().max()) > 1e-2 * float(expected.abs().max()), (
        "what is kept is not everything"
    )
    for micro, masks_per_chunk in ((5, 1000), (2, 3)):
        found, done = after(replace(run, micro_batch_size=micro, masks_per_chunk=masks_per_chunk))
        assert same(expected, found), (micro, masks_per_chunk)
        assert np.isfinite(done.losses).all()
        assert done.losses == pytest.approx(losses, rel=1e-9)


def test_image_without_mined_masks_is_still_in_the_loss_history(tmp_path, scenes):
    run = mining_run(tmp_path / "run", scenes, OHEM(0.1))
    expected, losses, kept = plainly(run)
    assert sum(kept.values()) == 2
    for micro in (5, 1):
        found, done = after(replace(run, micro_batch_size=micro))
        assert same(expected, found)
        assert done.losses == pytest.approx(losses, rel=1e-9)
        assert done.record["loss"] > np.nanmean(losses), (
            "the log's loss is that of what is trained on"
        )


def test_a_minimum_beyond_the_batch_is_no_mining(tmp_path, scenes):
    run = mining_run(tmp_path / "run", scenes, OHEM(0.25, min_kept=256))
    (whole, all_masks), (found, done) = after(replace(run, mining=NoMining())), after(run)
    assert same(whole, found)
    assert done.record == pytest.approx(all_masks.record)
    assert done.losses == pytest.approx(all_masks.losses)


def test_weights_and_other_policies_are_cut_alike(tmp_path, scenes):
    run = mining_run(tmp_path / "run", scenes, OHEM(0.5), prompts=TwoSidedCorrection(corrections=1))
    (whole, _), (cut, _) = (
        after(
            replace(run, micro_batch_size=micro, masks_per_chunk=3), weigh=lambda place: 0.5 + place
        )
        for micro in (5, 2)
    )
    assert same(whole, cut)
    assert not same(whole, after(run)[0])


def by_ranks(folders: list[str]) -> None:
    """What each process of the test below does."""
    world = init_world(os.environ, CPU)
    for folder in folders:
        moved, done = after(config_files.load_config(folder, trust=True), world)
        torch.save(
            {"moved": moved, "losses": torch.from_numpy(done.losses), "skipped": done.skipped},
            f"{folder}/rank{world.rank}.pt",
        )
    destroy_world(world)


def test_two_processes_mine_what_one_does(tmp_path, scenes):
    """Of five images one process has three and the other two, in micro-batches of two."""
    runs = [
        mining_run(tmp_path / str(number), scenes, mining)
        for number, mining in enumerate((MININGS[0], MININGS[3]))
    ]
    alone = [after(run) for run in runs]
    fork(2, by_ranks, [run.out for run in runs])
    for run, (moved, outcome) in zip(runs, alone, strict=True):
        for rank in (0, 1):
            found = torch.load(f"{run.out}/rank{rank}.pt")
            assert same(moved, found["moved"]), (run.mining, rank)
            assert found["losses"].numpy() == pytest.approx(outcome.losses, rel=1e-9)
            assert not found["skipped"]


def spoil(monkeypatch, bad: set[str], bare: set[str]) -> None:
    """Lets the loader find some images unreadable, and others without a mask that is left."""
    whole = SampleSource.sample

    def sample(self, ref, entry=None):
        name = self.index.entry_name(ref.row)
        if name in bad:
            raise CorruptSampleError(f"{name}: spoilt")
        made, none = whole(self, ref, entry), np.zeros(0, np.int64)
        if name not in bare:
            return made
        draws = replace(
            made.random_inputs,
            first_prompt=made.random_inputs.first_prompt[:0],
            clicks=made.random_inputs.clicks[:0],
            box_noise=made.random_inputs.box_noise[:0],
        )
        return replace(
            made,
            masks=made.masks[none],
            boxes_input=made.boxes_input[:0],
            strata=made.strata[:0],
            random_inputs=draws,
        )

    monkeypatch.setattr(SampleSource, "sample", sample)


def names_of(run) -> list[str]:
    return list(whole_batch(run).names)


@pytest.mark.parametrize("mining", [MININGS[0], MININGS[3]], ids=repr)
def test_unreadable_images_and_images_without_masks_are_not_there(
    tmp_path, scenes, monkeypatch, mining
):
    run = mining_run(tmp_path / "run", scenes, mining)
    names = names_of(run)
    spoil(monkeypatch, {names[1]}, {names[3]})
    expected, losses, _ = plainly(run)
    assert np.isnan(losses).tolist() == [False, True, False, True, False]
    for micro in (5, 1):
        found, done = after(replace(run, micro_batch_size=micro))
        assert same(expected, found)
        assert done.losses == pytest.approx(losses, rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("readable", [0, 5])
def test_a_batch_without_a_mask_is_skipped(tmp_path, scenes, monkeypatch, readable):
    run = mining_run(tmp_path / "run", scenes, OHEM(min_kept=4))
    names = names_of(run)
    spoil(monkeypatch, set(names[readable:]), set(names))
    moved, done = after(run)
    assert done.skipped
    assert np.isnan(done.losses).all()
    assert not moved.any()


@dataclass(frozen=True)
class Broken(Loss):
    """The ordinary loss, but no number for masks whose box begins left of `x`."""

    x: float

    def __call__(self, round: PromptRound, targets: Targets) -> LossSums:
        terms = SamLoss()(round, targets)
        by_mask = terms.per_mask * torch.where(targets.boxes_input[:, 0] < self.x, torch.nan, 1.0)
        return replace(terms, loss=by_mask.sum(), per_mask=by_mask)


@pytest.mark.parametrize("mining", MININGS, ids=repr)
def test_a_loss_that_is_no_number_is_not_mined_away(tmp_path, scenes, mining):
    """One such mask makes the step be skipped as it would be without mining, and so does a model
    that is broken everywhere."""
    run = mining_run(tmp_path / "run", scenes, mining)
    (batch,) = next(TrainData(replace(run, micro_batch_size=5), open_index(run)).batches())
    lefts = batch.boxes_input[:, 0].sort().values
    one, every = float(lefts[0] + lefts[lefts > lefts[0]][0]) / 2, 1e9
    for x in (one, every):
        moved, done = after(replace(run, loss=Broken(x)))
        assert done.skipped
        assert not moved.any()
        with_nan = set(batch.batch_index[batch.mask_image[batch.boxes_input[:, 0] < x]].tolist())
        assert set(np.flatnonzero(np.isnan(done.losses)).tolist()) == with_nan, (
            "the ledger holds the others' losses"
        )
    assert after(replace(run, loss=Broken(one), mining=NoMining()))[1].skipped


def batches_of(run) -> list:
    stream, found = TrainData(run, open_index(run)).batches(), []
    for _ in range(3):
        found += next(stream)
    stream.close()
    return found


@pytest.mark.parametrize("workers", [0, 1])
def test_the_samplers_strata_reach_the_batch(tmp_path, scenes, workers):
    """Those of images are given to all their masks, whatever these are."""
    sampler = Stratified(("masks",), per_stratum=2)
    run = run_in(
        tmp_path / "run",
        scenes,
        sampler=sampler,
        mining=OHEM(group_by="sampler"),
        loader=replace(little().loader, workers=workers),
    )
    index = open_index(run)
    items = open_sample_table(index, run.sample_config.filters, "image", None, 0, True).items
    kinds = np.unique(items.columns["masks"], return_inverse=True)[1]
    found = batches_of(run)
    for batch in found:
        assert batch.strata.tolist() == [
            kinds[index.find(batch.names[image])] for image in batch.mask_image.tolist()
        ]
    assert len(torch.cat([batch.strata for batch in found]).unique()) > 2


@pytest.mark.parametrize(
    "items, sampler, mining",
    [
        ("image", little().sampler, OHEM(group_by="granularity")),
        ("image", Stratified(per_stratum=4), OHEM(group_by="granularity")),
        ("mask", InterleavedStrata(ratio=(0, 1, 1)), OHEM(group_by="sampler")),
    ],
)
def test_else_a_masks_stratum_is_its_granularity(tmp_path, scenes, items, sampler, mining):
    """Where mining does not ask for the sampler's; a single mask's is the same by either."""
    run = run_in(
        tmp_path / "run",
        scenes,
        sampler=sampler,
        mining=mining,
        loader=replace(little().loader, items=items, max_masks=64),
    )
    found = batches_of(run)
    index = open_index(run)
    for batch in found:
        for image, name in enumerate(batch.names):
            row = index.find(name)
            shares = index.masks["area"][index.mask_rows(row)] / (
                int(index.images["height"][row]) * int(index.images["width"][row])
            )
            assert not Counter(batch.strata[batch.mask_image == image].tolist()) - Counter(
                granularity(shares).tolist()
            ), name
    assert len(torch.cat([batch.strata for batch in found]).unique()) == 2, (
        "scenes have no fine masks"
    )


def test_a_sampler_without_strata_cannot_be_mined_within(tmp_path, scenes):
    run = run_in(tmp_path / "run", scenes, mining=OHEM(group_by="sampler"))
    told = r"^Random has no strata"
    with error_line(told):
        TrainData(run, open_index(run))
