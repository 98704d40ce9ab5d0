"""Requests for jobs in the training environment: a preview of data, a measurement of a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from agents.contract.data import DataPreview
from agents.contract.names import MAX_WAIT_S, check_number
from agents.contract.node import Calibration
from agents.contract.requests import NodeRequest
from agents.contract.spec import RunSpec

CALIBRATION_MARGIN_S = 120.0
"""Time to start torch and compile kernels, in addition to a measurement, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviewJob(NodeRequest[DataPreview]):
    """Preview data as a run would read it; needs the model's tokenizer but no GPU."""

    kind = "data.preview"
    limit_s = None
    is_verbatim = True
    python: str
    spec: RunSpec
    model_path: str
    """Folder on this node, of which the tokenizer is enough, or the hub id."""
    train_path: str
    held_out_from: str | None = None
    """Training data of the run, if `train_path` is its evaluation data."""
    more_paths: tuple[str, ...] = ()
    """Paths of the further sources of training data."""
    eval_path: str | None = None
    """Evaluation data, if copies of its rows are left out of the training data."""
    held_out: bool = False
    """True for the rows that are held out of the training data."""
    whole: bool = True
    """True to tokenize all rows and keep the tokens for the run; False to read only the first
    rows."""
    count_s: float | None = None
    """Time in which rows are only counted, in seconds; the answer is `whole` if it sufficed for all
    of them. None: no count."""

    def check_foreign(self) -> None:
        if self.count_s is not None:
            check_number("count_s", self.count_s, 0, MAX_WAIT_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationJob(NodeRequest[Calibration]):
    """Measure the real speed of one GPU, which must be otherwise idle, for about 20 seconds."""

    kind = "gpu.calibrate"
    python: str
    device: str
    """Device in the node's own order, such as `cuda:0`."""
    device_id: str
    """GPU uuid, which is leased during the job."""
    seconds: float = 20.0
    """Maximum duration of all measurements, without the start of torch, in seconds."""

    def check_foreign(self) -> None:
        check_number("seconds", self.seconds, 0, MAX_WAIT_S)

    def deadline_s(self) -> float | None:
        return self.seconds + CALIBRATION_MARGIN_S
