"""Several ranks go back together, whoever of them sees the spike; real processes, each started once."""

import pytest

from tests.guard.ranks import ended_well, lived
from tests.rewind.stories import STORIES

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.fixture(scope="module", params=[2, 3])
def world(request, tmp_path_factory):
    return request.param, lived(STORIES, tmp_path_factory.mktemp("ranks"), world=request.param, timeout=120)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_ranks(world, story):
    count, found = world
    ended_well(found, story, world=count)
