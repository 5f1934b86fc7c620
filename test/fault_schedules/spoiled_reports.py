"""Reports of stages that are not what the stage has said, or come twice."""

from random import Random

import msgspec

from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.wire.lease_orders import PagesLent
from sgl_pipeline.wire.stage_messages import StageReport
from sgl_pipeline.wire.store_orders import PagesLoaded, StoreReport


def spoiled(report: StageReport, rng: Random, chance: float) -> list[StageReport]:
    """What arrives of `report`: itself, or by that chance another one in its place, or both."""
    if rng.random() >= chance:
        return [report]
    tokens = report.token_ids
    other = rng.choice(
        (
            msgspec.structs.replace(report, step_id=report.step_id + rng.choice((1, 7))),
            msgspec.structs.replace(report, epoch=report.epoch + 1),
            msgspec.structs.replace(report, token_ids=(0,) if tokens is None else (*tokens, 0)),
            msgspec.structs.replace(report, timing=StageTiming(2.0, *[1.0] * 6)),
            msgspec.structs.replace(report),
        )
    )
    return [report, other] if other == report else [other]


def spoiled_store_report(report: StoreReport, rng: Random, chance: float) -> list[StoreReport]:
    """As `spoiled`."""
    if rng.random() >= chance:
        return [report]
    others: list[StoreReport] = [
        msgspec.structs.replace(report, transfer=report.transfer + 1_000),
        msgspec.structs.replace(report, num_pages=report.num_pages + 1_000),
        msgspec.structs.replace(report),
    ]
    if not isinstance(report, PagesLoaded):
        first, end = report.layers
        others += [
            msgspec.structs.replace(report, layers=(first + 1, end + 1)),
            msgspec.structs.replace(report, checksums=report.checksums + b"more"),
        ]
    other = rng.choice(others)
    return [report, other] if other == report else [other]


def spoiled_lease_report(report: PagesLent, rng: Random, chance: float) -> list[PagesLent]:
    """As `spoiled`."""
    if rng.random() >= chance:
        return [report]
    return [report, msgspec.structs.replace(report, stage=rng.choice((report.stage, 1_000)))]
