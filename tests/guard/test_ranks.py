"""Several ranks make the same step, whatever happens on one of them; real processes, each started once."""

import pytest

from tests.guard import (
    fault_injection,
    sharded_faults,
    stories_costs,
    stories_evidence,
    stories_models,
    stories_odd,
    stories_replicas,
    stories_repros,
    stories_shards,
    stories_tools,
    stories_totals,
)
from tests.guard.ranks import ended_well, lived, needs

pytestmark = pytest.mark.distributed
for story in (*stories_shards.STORIES, stories_totals.totals_of_shards):
    needs("2.9", "FSDP2 takes the mean of gradients over Gloo")(story)
OF_TWO = [
    *stories_tools.STORIES,
    *stories_odd.STORIES,
    *stories_replicas.STORIES,
    *stories_models.STORIES,
    *stories_shards.STORIES,
    *stories_totals.STORIES,
    *stories_evidence.STORIES,
    *stories_repros.STORIES,
    *stories_costs.STORIES,
    *fault_injection.STORIES,
    *sharded_faults.STORIES,
]
OF_THREE = [sharded_faults.shards_with_random_faults, sharded_faults.shards_that_accumulate_and_stay_whole]
OF_FOUR = [
    sharded_faults.shards_with_random_faults,
    fault_injection.steps_with_random_faults_in_many_buffers,
    *stories_costs.STORIES,
    sharded_faults.shards_in_copies,
    sharded_faults.shards_that_recompute_activations,
]


@pytest.fixture(scope="module")
def told_by_two(tmp_path_factory):
    return lived(OF_TWO, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("story", OF_TWO, ids=lambda story: story.__name__)
def test_two_ranks(told_by_two, story):
    ended_well(told_by_two, story)


@pytest.fixture(scope="module")
def told_by_three(tmp_path_factory):
    return lived(OF_THREE, tmp_path_factory.mktemp("three"), world=3)


@pytest.mark.parametrize("story", OF_THREE, ids=lambda story: story.__name__)
def test_three_ranks(told_by_three, story):
    ended_well(told_by_three, story, world=3)


@pytest.fixture(scope="module")
def told_by_four(tmp_path_factory):
    return lived(OF_FOUR, tmp_path_factory.mktemp("four"), world=4)


@pytest.mark.parametrize("story", OF_FOUR, ids=lambda story: story.__name__)
def test_four_ranks(told_by_four, story):
    ended_well(told_by_four, story, world=4)
