"""Opens the rooms of a server that has a role."""

import socket

import zmq

from sgl_pipeline.args import PipelineArgs
from sgl_pipeline.cluster.doors import join_address
from sgl_pipeline.disaggregation.decode_rooms import DecodeRooms
from sgl_pipeline.disaggregation.identity import ServerIdentity
from sgl_pipeline.disaggregation.prefill_rooms import PrefillRooms
from sgl_pipeline.disaggregation.room_limits import RoomLimits
from sgl_pipeline.managers.disaggregation.offering_stages import OfferingStages
from sgl_pipeline.managers.disaggregation.room_ends import DecodeEnd, PrefillEnd
from sgl_pipeline.managers.tiers.store_identity import store_identity
from sgl_pipeline.pipeline.offload_rule import OffloadRule
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.pipeline.stage_workers import StageWorkers
from sgl_pipeline.pp_runner.model.model_spec import ModelSpec


def open_rooms(
    args: PipelineArgs,
    spec: ModelSpec,
    core: PipelineCore,
    roster: StageWorkers,
    http_port: int,
    poller: zmq.Poller,
) -> PrefillEnd | DecodeEnd | None:
    """The server's end of the streams to its peers; None without a role.

    Reads a sample of the weights, as `store_identity`.
    """
    role, tier = args.disaggregation, core.scheduler.tier
    if not role.is_on:
        return None
    identity = _identity(args, spec, http_port)
    limits = RoomLimits(
        bootstrap_timeout_s=role.bootstrap_timeout_s,
        waiting_timeout_s=role.waiting_timeout_s,
        reserved_tokens=role.reserved_decode_tokens,
        falls_back=role.decode_fallback,
        silence_s=role.silence_s,
        lends=role.attention_offload,
    )
    run_directory, probability = args.run_directory, role.failure_probability
    if role.mode == "decode":
        rule = OffloadRule(core.scheduler, role.offload_ratio) if role.attention_offload else None
        core.offload = rule
        decode = DecodeRooms(core.scheduler, identity, limits, rule)
        return DecodeEnd(decode, tier, run_directory, poller, probability)
    stages = OfferingStages(core, roster)
    prefill = PrefillRooms(core.scheduler, identity, limits, stages())
    return PrefillEnd(prefill, tier, stages, run_directory, poller, probability)


def _identity(args: PipelineArgs, spec: ModelSpec, http_port: int) -> ServerIdentity:
    return ServerIdentity(
        name=join_address(socket.gethostname(), http_port),
        digest=store_identity(args, spec).digest,
        page_size=args.scheduling.page_size,
        num_layers=spec.num_layers,
        kv_dtype=args.stages.kv_dtype,
    )
