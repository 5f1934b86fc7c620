"""The transfers, offers and leases of a stage that becomes ready."""

import torch

from sgl_pipeline.pp_runner.kernel_choice import make_stage_attention
from sgl_pipeline.pp_runner.layer_moves.layer_mover import LayerMover
from sgl_pipeline.pp_runner.lent_attention.stage_leases import StageLeases
from sgl_pipeline.pp_runner.page_store.page_transfers import PageTransfers
from sgl_pipeline.pp_runner.page_store.stage_offers import PeerSite
from sgl_pipeline.pp_runner.stage_runner import StageRunner
from sgl_pipeline.wire.attention_messages import attention_door


def open_transfers(
    runner: StageRunner, mover: LayerMover[torch.Tensor], site: PeerSite
) -> PageTransfers:
    """The transfers between the pool of a stage and a store or peers, which reach it at `site`."""
    return PageTransfers(
        runner.stage,
        runner.held_layers.kv_pool,
        plan=lambda: mover.plan,
        may_start=lambda: not mover.awaits_pages,
        site=site,
        leases=open_leases(runner, mover, site),
    )


def open_leases(
    runner: StageRunner, mover: LayerMover[torch.Tensor], site: PeerSite
) -> StageLeases | None:
    """The leases of a stage on a CPU. It attends for peers with half of its threads, beside its
    steps."""
    if runner.device.type != "cpu":
        return None
    num_threads = max(1, torch.get_num_threads() // 2)
    return StageLeases(
        runner.stage,
        runner.held_layers.kv_pool,
        runner.shapes,
        lambda: make_stage_attention(
            runner.attention_backend, runner.shapes, num_threads=num_threads
        ),
        lambda: mover.plan.layers_of(runner.stage),
        site.run_directory,
        attention_door(site.door),
    )
