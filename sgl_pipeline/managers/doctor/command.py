"""Looks at a cluster before a server runs on it: `sgl-pipeline doctor`, the same on each host.

Rank 0 prints what was found, and what is wrong; the others what concerns them. Uses the port, the
key and the streams that a server would use.
"""

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sgl_pipeline.args import LOAD_FORMATS, ClusterArgs, require, require_stage_on_each
from sgl_pipeline.cluster.keys import read_secret, write_identity
from sgl_pipeline.errors import ConfigurationError, SglPipelineError
from sgl_pipeline.managers.channels.run_directory import RunDirectory
from sgl_pipeline.managers.doctor.doctor_messages import HostFacts, Verdict
from sgl_pipeline.managers.doctor.facts import own_facts
from sgl_pipeline.managers.doctor.findings import Findings
from sgl_pipeline.managers.doctor.head import doctor_head
from sgl_pipeline.managers.doctor.host_end import host_end
from sgl_pipeline.managers.doctor.other_host import answer_doctor
from sgl_pipeline.managers.doctor.report import as_facts, as_text
from sgl_pipeline.managers.planning.stage_flags import add_slots_flag, add_stage_flags

if TYPE_CHECKING:
    from sgl_pipeline.managers.doctor.pipeline_forecast import PipelineForecast

_EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code: 0 where all is well, 1 otherwise, 130 after Ctrl-C."""
    options = make_parser().parse_args(argv)
    logging.basicConfig(
        format=f"[doctor of host {options.node_rank}] %(message)s",
        level=logging.INFO,
        stream=sys.stderr,
    )
    try:
        cluster = _cluster(options)
        directory = RunDirectory()
        try:
            return _examine(cluster, options, directory.path)
        finally:
            directory.remove()
    except SglPipelineError as error:
        print(f"sgl_pipeline: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    """The command's flags; those of a server have its names."""
    parser = argparse.ArgumentParser(
        prog="sgl-pipeline doctor",
        description="Measures the links between hosts, compares the hosts, says what is wrong with "
        "them and what a pipeline would reach. To be started on each host.",
    )
    parser.add_argument("--nnodes", type=int, default=1, help="number of hosts")
    parser.add_argument("--node-rank", type=int, default=0, help="which of them this is")
    parser.add_argument("--dist-init-addr", help="HOST:PORT of rank 0, the same on every host")
    parser.add_argument("--cluster-key-file", help="else the key is in SGL_PIPELINE_CLUSTER_KEY")
    parser.add_argument(
        "--wait-s", type=float, default=30.0, help="how long hosts may take to come (default 30)"
    )
    parser.add_argument("--json", action="store_true", help="for programs, in place of the tables")
    parser.add_argument(
        "--model", "--model-path", help="to compare and to forecast: directory or fetched hub id"
    )
    parser.add_argument(
        "--load-format",
        default="auto",
        choices=LOAD_FORMATS,
        help="as of the server: dummy weights need no files",
    )
    parser.add_argument("--pp", type=int, help="stages to forecast; by default one a host")
    add_stage_flags(parser)
    add_slots_flag(parser)
    parser.set_defaults(device="cpu")  # the hosts' memory is looked at, and not their GPUs'
    return parser


def _cluster(options: argparse.Namespace) -> ClusterArgs:
    require(
        0.0 < options.wait_s < float("inf"), f"--wait-s {options.wait_s:g} must be above 0 seconds"
    )
    cluster = ClusterArgs(
        num_hosts=options.nnodes,
        rank=options.node_rank,
        head_address=options.dist_init_addr,
        key_file=options.cluster_key_file,
    )
    if options.pp is not None:
        require_stage_on_each(options.pp, cluster.num_hosts)
    return cluster


def _examine(cluster: ClusterArgs, options: argparse.Namespace, run_directory: str) -> int:
    own = own_facts(cluster, options)
    if cluster.num_hosts == 1:
        return _report(cluster, options, Findings(hosts={0: own}, probes={}))
    write_identity(read_secret(cluster.key_file), run_directory)
    if cluster.rank == 0:
        findings = asyncio.run(lead(cluster, own, run_directory, options.wait_s))
        return _report(cluster, options, findings)
    verdict = asyncio.run(follow(cluster, own, run_directory, options.wait_s))
    facts = {"is_well": not verdict.faults, "faults": list(verdict.faults)}
    text = "\n".join(["wrong:", *(f"  {fault}" for fault in verdict.faults)])
    well = "nothing is wrong; rank 0 shows what was found"
    print(json.dumps(facts) if options.json else text if verdict.faults else well)
    return int(bool(verdict.faults))


async def lead(
    cluster: ClusterArgs, own: HostFacts, run_directory: str, limit_s: float
) -> Findings:
    """The part of rank 0; the others may take `limit_s` to come."""
    async with (
        host_end(own.hello.address, run_directory) as port,
        doctor_head(cluster, own, run_directory) as head,
    ):
        await head.gather(limit_s)
        probes = await head.measure()
        head.name_dropped(port)
        findings = Findings(hosts=head.facts, probes=probes, connection_faults=tuple(head.faults))
        # The forecast is rank 0's alone, and the others need not wait for it.
        await head.say(Verdict(findings.faults))
    return findings


async def follow(
    cluster: ClusterArgs, own: HostFacts, run_directory: str, limit_s: float
) -> Verdict:
    """The part of any other rank; rank 0 may take `limit_s` to come.

    Raises ConfigurationError as `answer_doctor`.
    """
    assert cluster.head_address is not None
    async with host_end(own.hello.address, run_directory):
        return await answer_doctor(cluster.head_address, own, run_directory, limit_s)


def _report(cluster: ClusterArgs, options: argparse.Namespace, findings: Findings) -> int:
    """Prints the findings; the exit code."""
    faults = [*findings.faults]
    forecast: PipelineForecast | str
    try:
        forecast = _forecast(cluster, options, findings)
    except SglPipelineError as error:
        forecast = "no forecast: see below"
        faults.append(str(error))
    if options.json:
        print(json.dumps(as_facts(findings, forecast, faults), indent=1))
    else:
        print(as_text(findings, forecast, faults))
    return int(bool(faults))


def _forecast(
    cluster: ClusterArgs, options: argparse.Namespace, findings: Findings
) -> "PipelineForecast | str":
    """The pipeline that the hosts would reach, or the reason why none can be forecast.

    Raises ConfigurationError where the model does not fit.
    """
    if options.model is None:
        return "no forecast: name a model with --model-path"
    num_pairs = cluster.num_hosts * (cluster.num_hosts - 1) // 2
    if findings.hosts[0].model_fault or len(findings.links) < num_pairs:
        return "no forecast: it needs the model, and all hosts and links"
    from sgl_pipeline.managers.doctor.pipeline_forecast import (
        make_forecast,
        num_stages,
        saved_costs,
    )

    try:
        saved = saved_costs(options, cluster)
    except ConfigurationError as error:
        return f"no forecast: {error}"
    return make_forecast(saved, findings, num_stages(options, cluster))
