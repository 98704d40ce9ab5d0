"""Handlers of long jobs outside a run: preview data, measure a GPU.

The program's report is the answer, passed on unchanged.
"""

from __future__ import annotations

import socket
from typing import Any

from agents.contract.requests.jobs import CalibrationJob, PreviewJob
from agents.contract.wire import to_wire
from agents.serve.channel import Call
from agents.serve.handlers import handles
from agents.serve.programs import report_of
from agents.supervisor.leases import borrow_device


@handles(PreviewJob)
def preview_data(call: Call, job: PreviewJob) -> dict[str, Any]:
    """Tokenize data as a run would; return the preview."""
    module = "agents.trainer.data.preview"
    return report_of(call, job.python, module, to_wire(job), "The preview of the data")


@handles(CalibrationJob)
def calibrate(call: Call, job: CalibrationJob) -> dict[str, Any]:
    """Measure the speed of a free GPU."""
    # The callback declines to wait: a measurement of a busy GPU would be wrong.
    node = socket.gethostname()
    with borrow_device(call.home, job.device_id, "a measurement", node, lambda name: False):
        module, what = "agents.trainer.calibration", f"The measurement of {job.device}"
        return report_of(call, job.python, module, to_wire(job), what)
