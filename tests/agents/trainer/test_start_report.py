"""What a rank says of too little data before its first step."""

from __future__ import annotations

import pytest

from agents.contract.model_cut import ModelCut, Stage
from agents.contract.run import AttemptIntent, RankPlacement
from agents.contract.spec import DataSpec, RunSpec
from agents.trainer.start_report import find_shortages

ONE_CHAIN = ModelCut(
    mode="pipeline",
    stages=tuple(Stage(rank=rank, first_layer=rank, stop_layer=rank + 1) for rank in range(3)),
)
TWO_CHAINS = ModelCut(
    mode="pipeline",
    stages=(
        Stage(rank=0, first_layer=0, stop_layer=2),
        Stage(rank=1, first_layer=2, stop_layer=3),
        Stage(rank=2, replica=1, first_layer=0, stop_layer=3),
    ),
)


@pytest.mark.parametrize(
    ("cut", "num_rows", "said"),
    [
        (None, 1, ["There is 1 row for 3 ranks."]),
        (None, 3, ["A batch of 4 sequences takes the 3 rows of the data more than once."]),
        (ONE_CHAIN, 1, ["A batch of 4 sequences takes the only row of the data more than once."]),
        (TWO_CHAINS, 1, ["There is 1 row for 2 pipelines."]),
        (TWO_CHAINS, 4, []),
    ],
)
def test_all_gpus_of_a_pipeline_compute_the_same_rows(cut, num_rows, said):
    intent = AttemptIntent(
        run_id="r1",
        attempt=1,
        node="a",
        spec=RunSpec(model="m", data=DataSpec(train="d"), batch_sequences=4),
        python="python3",
        ranks=tuple(
            RankPlacement(rank=rank, local_rank=rank, node="a", device="cpu") for rank in range(3)
        ),
        master_address="127.0.0.1",
        master_port=29500,
        address="127.0.0.1",
        model_path="m",
        train_path="d",
        cut=cut,
    )

    found = list(find_shortages(intent, num_rows, 3))

    assert [message for message, _ in found] == said
    assert not any("one GPU" in hint for _, hint in found if cut is not None)
