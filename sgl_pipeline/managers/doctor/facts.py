"""Facts that this host reports to the doctor: a server's hello, and reasons, versions and speed."""

import argparse
import importlib.metadata
import platform
import time

from sgl_pipeline.args import ClusterArgs
from sgl_pipeline.cluster.doors import join_address, split_address
from sgl_pipeline.cluster.interfaces import OwnAddress, agent_own_address, head_own_address
from sgl_pipeline.cluster.model_digest import model_digest
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.host_memory import available_memory_bytes
from sgl_pipeline.managers.command_line.model_files import find_model
from sgl_pipeline.managers.doctor.doctor_messages import HostFacts
from sgl_pipeline.managers.hosts.host_facts import host_hello
from sgl_pipeline.model_directory import weight_format

_PACKAGES = ("torch", "sglang")


def own_facts(cluster: ClusterArgs, options: argparse.Namespace) -> HostFacts:
    """The facts of this host; `options` are those of the command.

    Raises ConfigurationError where the others could not reach this host.
    """
    own, address = _own_address(cluster)
    digest, fault = _digest(options.model, weight_format(options.load_format, options.model))
    step_ms, missing = None, ""
    if options.model is not None and not fault:
        step_ms, missing = _step_ms(options, cluster)
    return HostFacts(
        hello=host_hello(cluster, address, own.interface, digest),
        address_reason=own.reason,
        available_bytes=available_memory_bytes(),
        versions={"python": ".".join(platform.python_version_tuple()[:2])}
        | {name: _version(name) for name in _PACKAGES},
        wall_s=time.time() - time.monotonic(),
        model_fault=fault,
        step_ms=step_ms,
        costs_missing=missing,
    )


def _own_address(cluster: ClusterArgs) -> tuple[OwnAddress, str]:
    """The address at which other hosts reach this one, without and with the port; empty if there is
    one host."""
    if cluster.head_address is None:
        return OwnAddress("", "", "there is one host"), ""
    find = head_own_address if cluster.rank == 0 else agent_own_address
    own = find(cluster.head_address)
    return own, join_address(own.host, split_address(cluster.head_address)[1])


def _digest(model: str | None, load_format: str) -> tuple[str, str]:
    """The model's digest, and the reason why there is none if a model was named."""
    if model is None:
        return "", ""
    try:
        path = find_model(model, None, None, load_format, may_fetch=False)
        return model_digest(path, load_format), ""
    except ConfigurationError as error:
        return "", str(error)


def _step_ms(options: argparse.Namespace, cluster: ClusterArgs) -> tuple[float | None, str]:
    """The time that all parts of the model take here for the forecasts' step; else the reason why
    it is unknown."""
    from sgl_pipeline.managers.doctor.pipeline_forecast import saved_costs

    try:
        costs = saved_costs(options, cluster).costs
    except ConfigurationError as error:
        return None, str(error)
    return sum(costs.layers_ms) + costs.embedding_ms + costs.head_ms, ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
