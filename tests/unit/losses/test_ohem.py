import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gigamask.losses.ohem import OHEM, NoMining

NAN = math.nan
LOSSES = st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 7.0, math.inf, NAN]), max_size=40)
SHARES = st.sampled_from([0.01, 0.1, 0.25, 1 / 3, 0.5, 0.9, 1.0])
MINIMA = st.sampled_from([0, 1, 2, 5, 256])
STRATUM = st.sampled_from([-1, 0, 1, 2, 2**40, -(2**50)])


def plainly(losses, share, least):
    """One stratum, position by position."""
    readable = [place for place, loss in enumerate(losses) if loss == loss]
    count = min(len(readable), max(math.ceil(share * len(readable)), least))
    return set(sorted(readable, key=lambda place: (-losses[place], place))[:count])


def kept(mining, losses, strata):
    found = mining.keep(
        torch.tensor(losses, dtype=torch.float32), torch.tensor(strata, dtype=torch.int64)
    )
    assert found.dtype == torch.bool
    return set(found.nonzero().flatten().tolist())


@pytest.mark.slow
@pytest.mark.parametrize("group_by", ["batch", "sampler", "granularity"])
@given(LOSSES, SHARES, MINIMA, st.data())
def test_the_hardest_of_all_or_of_every_stratum_are_kept(group_by, losses, share, least, data):
    strata = data.draw(st.lists(STRATUM, min_size=len(losses), max_size=len(losses)))
    groups, expected = strata if group_by != "batch" else [0] * len(losses), set()
    for group in set(groups):
        places = [place for place, each in enumerate(groups) if each == group]
        expected |= {
            places[inside] for inside in plainly([losses[place] for place in places], share, least)
        }
    assert kept(OHEM(share, least, group_by), losses, strata) == expected


def test_without_mining_every_mask_that_is_there_is_kept():
    assert kept(NoMining(), [1.0, NAN, 0.0], [0, 0, 1]) == {0, 2}
    assert not NoMining().use_sampler_strata
    assert OHEM(group_by="sampler").use_sampler_strata
    assert not OHEM(group_by="granularity").use_sampler_strata
