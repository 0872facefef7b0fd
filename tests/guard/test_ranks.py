"""Several ranks make the same step, whatever happens on one of them; real processes, each started once."""

import pytest

from tests.guard import stories_evidence, stories_models, stories_replicas, stories_shards
from tests.guard.ranks import ended_well, lived

pytestmark = pytest.mark.distributed
STORIES = [*stories_replicas.STORIES, *stories_models.STORIES, *stories_shards.STORIES, *stories_evidence.STORIES]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return lived(STORIES, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_two_ranks(told, story):
    ended_well(told, story)
