"""Prefill and decode on servers of their own."""

from dataclasses import dataclass
from typing import Literal, get_args

from sgl_pipeline.args.checks import at_least, between, one_of, require
from sgl_pipeline.args.flags import check_flags, flags_of, our_flag, upstream_flag, without_flag

Mode = Literal["null", "prefill", "decode"]
DISAGGREGATION_MODES: tuple[Mode, ...] = get_args(Mode)
PAGE_LINK = "page_link"
_MODE = "--disaggregation-mode"
_FALLBACK = "--disaggregation-decode-fallback"


def _require_page_link(flag: str, value: str) -> None:
    require(
        value == PAGE_LINK,
        f"{flag} {value} is not built: pages go over encrypted TCP streams, from stage to stage; "
        f"leave the flag out, or give {PAGE_LINK}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationArgs:
    """The role of this server where prefill and decode are apart, by SGLang's flags and variables.

    `mode` "null": it does both. A prefill server listens at `bootstrap_port`; a decode server dials
    that port of a request that names none. `reserved_decode_tokens` are kept free on the decode
    server for each request that decodes or is on its way. With `decode_fallback` the decode server
    computes a prompt itself where its prefill server fails. A prefill server keeps the pages of a
    request for `bootstrap_timeout_s` until a decode server asks for them, and a decode server waits
    as long until they are computed; they may take `waiting_timeout_s` to cross. A peer is lost
    that says nothing for `silence_s`. `failure_probability` is that of a room, for tests.
    """

    mode: Mode = upstream_flag("null", _MODE, check=one_of(DISAGGREGATION_MODES))
    transfer_backend: str = upstream_flag(
        PAGE_LINK, "--disaggregation-transfer-backend", check=_require_page_link
    )
    bootstrap_port: int = upstream_flag(
        8998, "--disaggregation-bootstrap-port", check=between(1, 65535)
    )
    reserved_decode_tokens: int = upstream_flag(
        512, "--num-reserved-decode-tokens", check=at_least(0)
    )
    decode_fallback: bool = our_flag(
        False,
        _FALLBACK,
        help="With --disaggregation-mode decode, prompts are computed here where their prefill "
        "server fails, or does not answer in time.",
    )
    bootstrap_timeout_s: float = without_flag(
        300.0, "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT sets it"
    )
    waiting_timeout_s: float = without_flag(300.0, "SGLANG_DISAGGREGATION_WAITING_TIMEOUT sets it")
    silence_s: float = without_flag(4.0, "SGLANG_DISAGGREGATION_HEARTBEAT_* set it")
    failure_probability: float = without_flag(0.0, "SGLANG_TEST_DISAGG_FAILURE_PROB sets it")

    @property
    def is_on(self) -> bool:
        """True if this server does only one of the two."""
        return self.mode != "null"

    @property
    def engine_type(self) -> str:
        """SGLang's name of the role in metrics."""
        return self.mode if self.is_on else "unified"

    def __post_init__(self) -> None:
        check_flags(self)
        if not self.is_on:
            for one, flag in flags_of(self):
                require(
                    getattr(self, one.name) == one.default,
                    f"{flag.names[0]} does nothing without {_MODE}",
                )
        require(
            self.mode == "decode" or not self.decode_fallback,
            f"{_FALLBACK} is for {_MODE} decode, this is {self.mode}",
        )
