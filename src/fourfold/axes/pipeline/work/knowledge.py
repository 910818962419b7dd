"""Knowledge: what the first batch has shown of a model that is divided into stages.

need  of a stage: a value in front of it, besides the output of the block before it
late  a buffer of no module of the chain that the last stage writes, and so has; others are of the first stage
Law: all ranks of a pipeline know the same, so each knows what the others send.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from fourfold.axes.pipeline.work.chain import StageMap
from fourfold.axes.pipeline.work.stand_in import BUFFER, OUTPUT, WEIGHT, Source
from fourfold.axes.pipeline.work.values import Described, Form


@dataclass
class Knowledge:
    """See above.

    forms       of what modules return and keep, by source
    first       what these were in the first run
    attributes  of modules, that forwards write
    needs       by stage
    writers     modules that write into their arguments
    is_complete whether every rank has had a batch with samples: what comes later is no first batch
    outputs     forms of what the model returns, by text
    """

    stages: StageMap
    forms: dict[Source, Form] = field(default_factory=dict)
    first: dict[Source, tuple[Described, ...]] = field(default_factory=dict)
    attributes: list[Source] = field(default_factory=list)
    needs: dict[int, set[Source]] = field(default_factory=dict)
    writers: set[str] = field(default_factory=set)
    late_buffers: set[str] = field(default_factory=set)
    outputs: dict[str, Form] = field(default_factory=dict)
    is_complete: bool = False

    def received_by(self, stage: int) -> frozenset[Source]:
        """What a stage receives for itself and for later ones, besides its input."""
        later = (each for index, needs in self.needs.items() if index >= stage for each in needs)
        return frozenset(each for each in later if self.is_in_front(stage, each))

    def note_needs(self, stage: int, sources: Collection[Source]) -> Source | None:
        """Note that a stage needs these values. Returns one that it cannot be sent; None: it can be sent all."""
        needs = self.needs.setdefault(stage, set())
        refused = [each for each in sources if not (self.is_in_front(stage, each) or self._is_at_hand(stage, each))]
        if refused or needs.issuperset(sources):
            return min(refused or sources)
        needs.update(sources)
        return None

    def is_in_front(self, stage: int, source: Source) -> bool:
        """Whether a stage may be sent this value, which an earlier one has."""
        if source.kind in (WEIGHT, BUFFER):
            return stage > 0 and source.name in self.stages.chain.own
        return any(is_of(source, name) for name in self.stages.modules_in_front(stage))

    def _is_at_hand(self, stage: int, source: Source) -> bool:
        """Whether this is a buffer of another stage that the rank of this one has, if stages interleave."""
        return source.kind == BUFFER and self.stages.place_of(source.name) == stage % self.stages.num_places

    def report(self, stages: range) -> dict[str, Any]:
        """What a rank with these stages has found, for the others."""
        needs = [(stage, sorted(self.needs.get(stage, ()))) for stage in stages]
        return {
            "needs": needs,
            "attributes": self.attributes,
            "late": sorted(self.late_buffers),
            "writers": sorted(self.writers),
        }

    def merge(self, report: Mapping[str, Any]) -> None:
        """Learn what another rank has found."""
        for stage, needs in report["needs"]:
            self.needs.setdefault(stage, set()).update(Source(*each) for each in needs)
        self.attributes[:] = sorted({*self.attributes, *(Source(*each) for each in report["attributes"])})
        self.late_buffers.update(report["late"])
        self.writers.update(report["writers"])

    def clear(self) -> None:
        """Forget a first batch that has ended with an error."""
        found = (self.forms, self.first, self.attributes, self.needs, self.writers, self.late_buffers, self.outputs)
        for each in found:
            each.clear()


def is_of(source: Source, module: str) -> bool:
    """Whether a module returns this, or keeps it, or a module inside it does."""
    return source.name == module if source.kind == OUTPUT else source.name.startswith(f"{module}.")
