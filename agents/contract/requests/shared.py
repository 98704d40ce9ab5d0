"""Request for the places at which a node can use files of the master without a copy."""

from __future__ import annotations

from dataclasses import dataclass

from agents.contract.in_place import MAX_QUERIES, PlaceAnswer, PlaceQuery
from agents.contract.requests import NodeRequest
from agents.contract.wire import WireError


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceAnswers:
    answers: tuple[PlaceAnswer, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceQueries(NodeRequest[PlaceAnswers]):
    """Find files of the master on shares, comparing their content, with `progress` events."""

    kind = "files.places"
    limit_s = None
    queries: tuple[PlaceQuery, ...]

    def check_foreign(self) -> None:
        if len(self.queries) > MAX_QUERIES:
            raise ValueError(f"queries has {len(self.queries)} items; at most {MAX_QUERIES} fit")

    def check_answer(self, answer: PlaceAnswers) -> None:
        if len(answer.answers) != len(self.queries):
            raise WireError("it has another number of places")
